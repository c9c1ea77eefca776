"""Making experts: training on one's own images, importing networks, and the proof that a file answers as its source.

`expert_file` writes every expert that is made. Nothing here runs in the daemon.
"""
