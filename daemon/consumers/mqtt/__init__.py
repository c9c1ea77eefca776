"""MQTT 5: `settings` and credentials, `consumer`, and `broker`, the connection that it uses.

Only `consumer` and `broker` import paho, which the extra `mqtt` installs.
"""
