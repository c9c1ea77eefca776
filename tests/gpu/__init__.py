"""`make gpu`: what a machine with a GPU does, in absolute figures, as the section "A GPU" of docs/benchmarks.md.

`stages.py` measures, `expert_files.py` makes the experts, `page.py` keeps the figures and writes the section,
`own_torch.py` prepares machines without a network. Nothing here is imported by the product.
"""
