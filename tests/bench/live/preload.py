"""Imports that every run of the live benchmark has behind it when its process begins."""

import logging

import structlog

import experts.vision.infer
import experts.vision.slot  # noqa: F401
from experts.vision.frameworks import torchvision, ultralytics

torchvision()
ultralytics()
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
