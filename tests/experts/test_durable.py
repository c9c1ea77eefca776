import os
import stat
from pathlib import Path

import pytest

from experts.durable import replace_durably


def test_what_is_no_file_is_never_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"  # as /dev/null is a device
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="is never replaced"):
        replace_durably(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
