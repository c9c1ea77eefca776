"""Storage that outlives the process: the journal, the writer, archived images, full disks (`disk_space`), retention.

An image passes through `journal` and `writer` between `accepted` and its durable verdict; the statements that the
database gets are in `storage.database`. Nothing here decides a verdict or an order.
"""
