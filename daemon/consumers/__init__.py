"""Kinds of consumers: what a kind offers (`protocol`), the list of kinds (`kinds`), MQTT and a plant's hub.

A new kind is one file or folder here, one entry in `kinds` and its test. Nothing here reads the database or knows what
was delivered.
"""
