"""The web pages, a process of their own: who may see them, live events, pictures, the server. Each page is in `pages`.

Reads the database and asks the control socket; changes nothing but reviews. Nothing that happens here delays an image.
"""
