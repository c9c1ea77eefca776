"""MQTT 5: `settings` with its credentials, `consumer` over `broker`.

Only the last two import the packages of the extra `mqtt`.
"""
