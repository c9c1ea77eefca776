"""The web pages: a process of its own beside the daemon (`__main__`), so that no page delays an image.

`app` lists every page, `pages` holds them, `site` what they share. The plant's pages (daemon/plant/page)
stand in the same frame and use `site` and what counts silence; nothing else here is imported elsewhere. The process
reads the database and asks the control socket; it changes nothing itself: reviews are written by the daemon.
"""
