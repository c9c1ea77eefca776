"""Releases: signed, content-addressed versions of experts and rules that lines of one plant share (docs/releases.md).

`manifest`, `signing` and `store` are for commands and the hub; `hub_store` reaches a hub over HTTP, for its store and
for the pictures of the consumer `plant`. Nothing here changes a line.
"""
