"""Without a writable cache a traceback goes to a file that nobody could have prepared."""

import stat
import tempfile

from launch import error_log


def test_the_log_in_the_temporary_folder_has_no_known_name(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / "errors.log").symlink_to(victim)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(error_log, "CACHE", tmp_path / "file" / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    error_log._temporary_log.cache_clear()
    logs = [error_log.log_error(ValueError(text)) for text in ("one", "two")]
    error_log._temporary_log.cache_clear()
    assert victim.read_text() == ""
    assert logs[0] == logs[1]
    assert "two" in logs[0].read_text()
    assert stat.S_IMODE(logs[0].stat().st_mode) == 0o600
