"""The plant's pages: lines side by side, the worst defects, one serial's history, events, in the dashboard's frame.

`daemon.plant` imports `app.plant_pages`. Nothing here writes: the pages read the hub's database and ask no line.
"""
