"""Judging stored images again with other rules or experts (`coserve rejudge`). It changes nothing.

`job` puts it together.
"""
