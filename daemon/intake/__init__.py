"""Answers to publishers until an image is durable: admission, damaged files, limits, catching up.

`intake.Intake` owns the socket's thread, `admission.Admission` decides each answer, `backlog` has back-pressure and
quotas. Nothing here schedules or judges.
"""
