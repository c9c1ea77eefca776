"""Answers to publishers until an image is durable: admission, checks of payloads, back-pressure, quotas, catching up.

`intake.Intake` owns the socket's thread, `admission.Admission` decides each answer. Nothing here schedules or judges.
"""
