"""Storage that outlives the process. Nothing here decides a verdict or an order.

An image passes through `journal` and `writer` between `accepted` and its durable verdict; `retention` holds intake and
prunes while `disk_space` reports a shortage.
"""
