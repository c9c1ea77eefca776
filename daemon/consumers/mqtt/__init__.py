"""MQTT 5. Only `consumer` and `broker` import paho, which the extra `mqtt` installs."""
