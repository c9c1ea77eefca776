"""The client of a CoServe line: publish images to it, read its results. Needs pyzmq and nothing else.

Cameras use `SpoolingPublisher`; programs that may wait, such as batch jobs and tests, use `Publisher`; programs that
read verdicts use `Results`. Nothing here imports another package of CoServe: a camera's PC does not have them.
"""

from coserve_client.frames import CoserveError, CurveClient
from coserve_client.messages import (
    BoardReference,
    BoardResult,
    DetectionResult,
    GenerationResult,
    ImageAnswer,
    InspectionResult,
    Result,
    ReviewResult,
    StageResult,
)
from coserve_client.publisher import CameraImage, PublishAccount, Publisher, PublishError, publish_images
from coserve_client.results import Results, ResultsError
from coserve_client.spool import SpoolError
from coserve_client.spooling import NoRoomError, SpoolAccount, SpoolingPublisher

__version__ = "0.1.0"

__all__ = [
    "BoardReference",
    "BoardResult",
    "CameraImage",
    "CoserveError",
    "CurveClient",
    "DetectionResult",
    "GenerationResult",
    "ImageAnswer",
    "InspectionResult",
    "NoRoomError",
    "PublishAccount",
    "PublishError",
    "Publisher",
    "Result",
    "Results",
    "ResultsError",
    "ReviewResult",
    "SpoolAccount",
    "SpoolError",
    "SpoolingPublisher",
    "StageResult",
    "publish_images",
]
