"""Tests of the guarantees that both coordination stores give: the store of elasticrs and etcd."""

from typing import Any

from elasticrs import _core
from elasticrs._core import Compare, Op


def pair(found: _core.Entry | None) -> tuple[str, bytes] | None:
    return found and (found.key, found.value)


class StoreContract:
    """Tests with two sessions of one store. The module's fixtures ``client`` and ``other`` each provide a
    :class:`~helpers.coordination.Client`.
    """

    def test_reads_of_a_transaction_see_its_writes(self, client: Any) -> None:
        operations = [Op.put("k", b"1", False), Op.get("k"), Op.range("", 0), Op.delete("none")]
        reply = client.txn([Compare.missing("k")], operations)
        assert reply.ok
        one, got, (found,), none = reply.results
        assert (one, none, pair(got), pair(found)) == (1, 0, ("k", b"1"), ("k", b"1"))
        assert found.create_revision == found.mod_revision == reply.revision

    def test_a_transaction_whose_compares_fail_runs_the_else_operations(self, client: Any) -> None:
        made = client.put("k", b"v")
        compares = [Compare.exists("k"), Compare.has_value("k", b"w")]
        reply = client.txn(compares, [Op.delete("k")], [Op.get("k"), Op.get("none")])
        found, none = reply.results
        assert (reply.ok, pair(found), found.create_revision, none) == (False, ("k", b"v"), made, None)

    def test_each_compare_holds_or_fails_as_expected(self, client: Any) -> None:
        made, changed = client.put("k", b"1"), client.put("k", b"2")
        holds = {
            Compare.created_at("k", made): True,
            Compare.created_at("k", changed): False,
            Compare.created_at("k", 0): False,
            Compare.created_at("none", 0): True,
            Compare.modified_at("k", changed): True,
            Compare.modified_at("k", made): False,
            Compare.modified_at("none", 0): True,
            Compare.exists("k"): True,
            Compare.exists("none"): False,
            Compare.missing("none"): True,
            Compare.missing("k"): False,
            Compare.has_value("k", b"2"): True,
            Compare.has_value("k", b"1"): False,
            Compare.has_value("none", b""): False,
        }
        assert [client.txn([compare]).ok for compare in holds] == [*holds.values()]

    def test_deletions_return_the_number_of_deleted_keys(self, client: Any) -> None:
        for key in ("a/1", "a/2", "b"):
            client.put(key)
        deletions = [Op.delete_prefix("a/"), Op.delete("b"), Op.delete("c")]
        assert client.txn(then=deletions).results == [2, 1, 0]

    def test_a_range_may_have_a_limit(self, client: Any) -> None:
        for key in ("a/2", "a/1", "b"):
            client.put(key)
        (found,) = client.txn(then=[Op.range("a/", 1)]).results
        assert [each.key for each in found] == ["a/1"]

    def test_the_predecessor_is_the_key_that_was_created_just_before(self, client: Any) -> None:
        for key in ("n/b", "n/a", "other", "n/c"):
            client.put(key)
        client.put("n/b", b"overwritten")
        found = client.txn(then=[Op.predecessor("n/", key) for key in ("n/b", "n/a", "n/c", "none")])
        assert [each and each.key for each in found.results] == [None, "n/b", "n/a", None]

    def test_the_last_name_among_keys_created_together_is_the_predecessor(self, client: Any) -> None:
        client.txn(then=[Op.put(key, b"", False) for key in ("n/2", "n/3", "n/1")])
        found = client.txn(then=[Op.put("n/0", b"", False), Op.predecessor("n/", "n/0")])
        assert found.results[1].key == "n/3"

    def test_leased_keys_are_removed_when_the_session_closes(self, client: Any, other: Any) -> None:
        client.txn(then=[Op.put(f"mine/{n}", b"", n < 3) for n in (1, 2, 3)])
        found = other.watch("mine/", snapshot=True).results
        assert [each.key for each in found] == ["mine/1", "mine/2", "mine/3"]
        client.close()
        assert sorted(other.changes()) == [("mine/1", None), ("mine/2", None)]

    def test_a_leased_put_takes_over_the_lease(self, client: Any, other: Any) -> None:
        client.put("k", leased=True)
        other.put("k", leased=True)
        client.close()
        assert other.txn([Compare.exists("k")]).ok

    def test_each_revision_is_reported_completely_once_and_in_order(self, client: Any, other: Any) -> None:
        other.watch("a/")
        client.txn(then=[Op.put(key, key.encode(), False) for key in ("a/1", "x", "a/2")])
        client.put("a/1", b"3")
        assert sorted(other.changes()) == [("a/1", b"a/1"), ("a/2", b"a/2")]
        assert other.changes() == [("a/1", b"3")]

    def test_an_exact_watch_does_not_cover_longer_keys(self, client: Any, other: Any) -> None:
        other.watch("k", exact=True)
        client.put("kk")
        client.put("k")
        assert other.changes() == [("k", b"")]

    def test_a_watch_continues_right_after_its_snapshot(self, client: Any, other: Any) -> None:
        for index in range(20):
            client.inner.txn(index, [], [Op.put(f"w/{index:02}", b"", False)])
        found = [each.key for each in other.watch("w/", snapshot=True).results]
        while len(found) < 20:
            found += [key for key, _ in other.changes()]
        assert found == [f"w/{index:02}" for index in range(20)]

    def test_no_change_is_reported_after_unwatch(self, client: Any, other: Any) -> None:
        other.watch("k")
        other.inner.unwatch("k")
        other.watch("end")
        client.put("k")
        client.put("end")
        assert other.changes() == [("end", b"")]
