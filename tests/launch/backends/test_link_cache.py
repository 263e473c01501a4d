"""Link speeds measured by the doctor, as the planner finds them."""

from launch.backends.link_cache import LinkSpeeds, file_of, read_links, write_links
from suite.pipeline.planning.simulate import Link


def test_measured_links_are_found_and_measured_again(tmp_path):
    cache = tmp_path / "new" / "cache"
    assert read_links(cache, "head:6379") is None
    for rate in (1e9, 2e9):  # the second time the folder is there
        links = LinkSpeeds("head:6379", between_nodes=Link(1e-4, rate))
        assert write_links(cache, links) == cache / file_of("head:6379")
        assert read_links(cache, "head:6379") == links
    assert read_links(cache, "other:6379") is None
    for text in ("", "{", "[]", "{}", '{"cluster": "a", "between_nodes": {"seconds": 1}}'):
        (cache / file_of("head:6379")).write_text(text)
        assert read_links(cache, "head:6379") is None
