"""Storage that outlives the process: the journal, the writer's thread, archived images, free space, retention.

The way of an image from `accepted` to its durable verdict leads through `journal` and `writer`; the statements that the
database gets are in `storage.database`. Nothing here decides a verdict or an order.
"""
