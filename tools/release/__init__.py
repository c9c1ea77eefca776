"""Building what is handed out: the bundle for a PC without a network, and the licences of all that it holds.

Used by the Makefile in a checkout only.
"""
