"""The hub of a plant: `settings` of plant.yaml, `schema` and `upkeep` of its database, `picture_store`, process `hub`.

The command `coserve plant` imports from here. Nothing here judges images, and no line waits for it: lines write to the
hub's database themselves (daemon/consumers/plant), each from its own durable position.
"""
