"""The web pages, a process of their own (`__main__`) that nothing delays an image for. `app` names every page.

It reads the database and asks the control socket; it changes nothing but reviews. `site` is what pages share.
"""
