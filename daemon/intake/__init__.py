"""Answers to publishers until an image is durable. Nothing here schedules or judges."""
