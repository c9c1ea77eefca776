"""Language models in service: threads, memory shared with images, rows of texts. How they compute: experts/moe."""
