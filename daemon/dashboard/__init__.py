"""The web pages: a process of its own beside the daemon (`__main__`), so that no page delays an image.

`app` lists every page, `pages` holds them, `site` what they share. Nothing here is imported elsewhere. The process
reads the database and asks the control socket; it changes nothing itself: reviews are written by the daemon.
"""
