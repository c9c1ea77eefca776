"""Kinds of consumers: what a kind must offer (`protocol`), its settings, and MQTT.

A new kind is one file here and one entry in `kinds`. Nothing here reads the database or knows what was delivered.
"""
