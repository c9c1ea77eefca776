"""Answers to publishers: admission, back-pressure, quotas, fairness, catching up, until an image is durable.

`intake.Intake` owns the socket's thread, `admission.Admission` decides each answer. Nothing here schedules or judges.
"""
