"""The web pages, in a process of their own that changes nothing itself, so that no page delays an image."""
