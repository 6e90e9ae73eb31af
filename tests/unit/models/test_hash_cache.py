"""The file of hashes: shared by processes, and worth nothing but time."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from shoal.models.hash_cache import HashCache, content_digest, file_key, hash_cache_file

A, B = "a" * 64, "b" * 40


def test_entries_of_several_writers_are_kept(tmp_path: Path) -> None:
    one, two = (HashCache(tmp_path / "deep" / "hashes.json") for _ in range(2))
    one.add({"k1": A})
    two.add({"k2": B})
    assert one.load() == two.load() == {"k1": A, "k2": B}
    threads = [threading.Thread(target=one.add, args=({str(number): A},)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(two.load()) == 10
    assert os.listdir(tmp_path / "deep") == ["hashes.json"]


@pytest.mark.parametrize("text", ["", "{ broken", "[1]", '{"k": 5, "l": "short"}'])
def test_a_damaged_file_is_an_empty_one(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hashes.json"
    file.write_text(text)
    assert HashCache(file).load() == {}
    HashCache(file).add({"k": A})
    assert HashCache(file).load() == {"k": A}


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = HashCache(tmp_path / "file" / "hashes.json")
    cache.add({"k": A})
    assert cache.load() == {}
    HashCache(None).add({"k": A})


def test_keys_follow_path_size_and_time_of_what_is_linked_to(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"content")
    link.symlink_to(file)
    os.utime(file, ns=(5, 5))
    key = file_key([file])
    assert file_key([link]) == key
    assert file_key([file], "other") != key
    os.utime(file, ns=(5, 6))
    assert file_key([file]) != key
    os.utime(file, ns=(5, 5))
    assert file_key([file]) == key
    file.write_bytes(b"contents")
    os.utime(file, ns=(5, 5))
    assert file_key([file]) != key


def test_digests_are_those_of_git_and_sha256(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"hello\n")
    assert content_digest(file, B) == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    assert content_digest(file, A) == hashlib.sha256(b"hello\n").hexdigest()


def test_the_file_lies_beside_the_weights_where_the_hubs_tools_do_not_mind(tmp_path: Path) -> None:
    from huggingface_hub import scan_cache_dir

    file = hash_cache_file(tmp_path)
    HashCache(file).add({"k": A})
    assert not scan_cache_dir(tmp_path).warnings
    assert hash_cache_file(None).name == "hashes.json"
