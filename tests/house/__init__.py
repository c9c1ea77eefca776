"""`make house`: what the code base is made of, counted from the tree, beside the figures it had and those it aims at.

`counts.py` reads the sources, `one_image.py` follows an image through a line on simulated devices, `picture.py` draws
the rooms and their arrows.
"""
