"""Language models in service: a thread each, the memory they share with images, the rows of what they wrote.

How a model computes is in experts/moe. Nothing here touches images but through the drive's limits.
"""
