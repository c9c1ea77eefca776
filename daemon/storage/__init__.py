"""What outlives the process: the journal, the writer's thread, kept images, free space, retention, the results stream.

Everything between `accepted` and a durable verdict is here. The database itself is `storage.database`. Nothing here
decides a verdict or an order.
"""
