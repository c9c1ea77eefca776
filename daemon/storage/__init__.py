"""Storage that outlives the process: journal, writer, archived images, full disks (`disk_space`, `retention`).

An image passes through `journal` and `writer` between `accepted` and its durable verdict; `retention` holds intake and
prunes while `disk_space` reports a shortage. The statements that the database gets are in `storage.database`. Nothing
here decides a verdict or an order.
"""
