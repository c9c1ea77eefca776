"""A plant's hub as a consumer: `tables` of the hub's database, `settings`; `rows` and `consumer` write there.

The hub itself (daemon/plant) and its pages import `tables`. Only `consumer` and what it imports need the extra `plant`.
"""
