"""Invariant 6 on every device by random histories, and what every choice of devices must hold."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roundhouse.vocabulary import Digest, ModelName
from services.loader.domain.device_ledger import DeviceLedger
from services.loader.domain.devices import Device
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.room import NotEnough, Offered
from services.loader.domain.sites import Impossible, Need, Placed, place, sites
from services.loader.domain.versions import ModelVersion

CAPACITY = 100
DEVICES = tuple(
    Device(index, f"d{index}", CAPACITY, link_group=index // 2, profile="1g" if index > 3 else "") for index in range(6)
)
VERSIONS = tuple(ModelVersion(ModelName(f"m{number}"), Digest(f"sha256:{number}")) for number in range(5))
KEYS = st.sampled_from(VERSIONS)
SHARES = st.integers(0, 120)
SITES = st.sampled_from([(0,), (1,), (2,), (5,), (0, 1), (2, 3)])


class Histories(RuleBasedStateMachine):
    """Loads on one or two devices that succeed, fail and are measured; `model` is a dictionary that should agree."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = DeviceLedger.of(DEVICES)
        self.model: dict[ModelVersion, dict[int, tuple[int, int]]] = {}
        self.lost: dict[int, int] = {}

    def free(self, index: int) -> int:
        """By the dictionary."""
        held = sum(sum(each[index]) for each in self.model.values() if index in each)
        return CAPACITY - held - self.lost.get(index, 0)

    @rule(key=KEYS, site=SITES, share=SHARES)
    def reserve(self, key: ModelVersion, site: tuple[int, ...], share: int) -> None:
        """A load begins on all of its devices, or on none; failing, it leaves the account exactly as it was."""
        if key in self.model:
            return
        before = self.ledger
        after = before.reserve(key, site, share)
        if any(share > self.free(index) for index in site):
            assert isinstance(after, NoRoom)
            return
        assert isinstance(after, DeviceLedger)
        assert after.release(key) == before
        assert after.commit(key).release(key) == before
        self.ledger, self.model[key] = after, dict.fromkeys(site, (share, 0))

    @rule(key=KEYS, site=SITES, share=SHARES)
    def claim(self, key: ModelVersion, site: tuple[int, ...], share: int) -> None:
        """A load takes what is free of what it needs, on each device."""
        held = self.model.get(key, dict.fromkeys(site, (0, 0)))
        if any(resident for _, resident in held.values()) or set(held) != set(site):
            return
        taken = {index: max(0, min(share - held[index][0], self.free(index))) for index in site}
        self.ledger = self.ledger.reserve_up_to(key, site, share)
        self.model[key] = {index: (held[index][0] + taken[index], 0) for index in site}
        short = sum(max(0, share - reserved) for reserved, _ in self.model[key].values())
        assert self.ledger.missing(key, site, share) == short

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A load succeeds."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.ledger = self.ledger.commit(key)
        self.model[key] = {index: (0, sum(held)) for index, held in self.model[key].items()}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), share=SHARES)
    def measure(self, data: st.DataObject, share: int) -> None:
        """A resident instance turns out larger or smaller on each of its devices, or the account stays as it is."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        held = self.model[key]
        if any(reserved for reserved, _ in held.values()):
            return
        after = self.ledger.resize(key, share)
        if any(share - resident > self.free(index) for index, (_, resident) in held.items()):
            assert isinstance(after, NoRoom)
            return
        assert isinstance(after, DeviceLedger)
        self.ledger, self.model[key] = after, dict.fromkeys(held, (0, share))

    @rule(index=st.integers(0, 5), size=SHARES)
    def lose(self, index: int, size: int) -> None:
        """Bytes are in use for which no model answers, at most what the account has free."""
        free = self.free(index) + self.lost.get(index, 0)
        self.ledger, self.lost[index] = self.ledger.found_unaccounted(index, size), min(size, free)

    @rule(key=KEYS)
    def release(self, key: ModelVersion) -> None:
        """A load fails, or an instance is gone; twice is the same as once."""
        self.ledger = self.ledger.release(key).release(key)
        self.model.pop(key, None)

    @invariant()
    def never_more_than_there_is(self) -> None:
        """Invariant 6 on each device, and the dictionary agrees."""
        for device in DEVICES:
            assert self.ledger.free_on(device.index) == self.free(device.index) >= 0
        assert self.ledger.capacity - self.ledger.resident - self.ledger.reserved == sum(map(self.free, range(6)))
        assert {key: self.ledger.site_of(key) for key in self.model} == {k: tuple(v) for k, v in self.model.items()}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    st.lists(st.tuples(SITES, st.integers(1, 60), st.booleans()), max_size=4),
    st.sampled_from([1, 2]),
    st.integers(1, 120),
    st.sampled_from([(), (0,), (4,), (0, 1), (1, 2), (4, 5), (7,)]),
)
def test_a_chosen_place_is_whole_linked_and_made_free_by_who_leaves(
    standing: list[tuple[tuple[int, ...], int, bool]], count: int, share: int, wanted: tuple[int, ...]
) -> None:
    """All or none of k devices of one link group; enough once those chosen have left, not without any of them (B22);
    never beside a stranger on a slice, unless the caller named it."""
    ledger, offered = DeviceLedger.of(DEVICES), []
    for key, (site, size, may_leave) in zip(VERSIONS[1:], standing, strict=False):
        reserved = ledger.reserve(key, site, size)
        if isinstance(reserved, DeviceLedger):
            ledger = reserved.commit(key)
            offered += [Offered(key, ledger.held_on(key))] if may_leave else []
    need = Need(VERSIONS[0], count, share)
    match place(ledger, need, offered, wanted):
        case Placed(site, leaving):
            assert site == wanted or not wanted
            assert len(set(site)) == count
            assert len({DEVICES[index].link_group for index in site}) == 1
            assert isinstance(_without(ledger, leaving).reserve(need.version, site, share), DeviceLedger)
            for stays in leaving:
                others = [each for each in leaving if each != stays]
                assert isinstance(_without(ledger, others).reserve(need.version, site, share), NoRoom)
            strangers = {key for index in site for key in ledger.holders_on(index) if DEVICES[index].is_slice}
            assert wanted or strangers <= {each.key for each in offered}
        case NotEnough(missing):
            assert missing > 0
            everyone = _without(ledger, [each.key for each in offered])
            possible = [wanted] if wanted else list(sites(everyone, need))
            for site in possible:
                closed = not wanted and any(DEVICES[i].is_slice and list(everyone.holders_on(i)) for i in site)
                assert closed or isinstance(everyone.reserve(need.version, site, share), NoRoom)
        case Impossible(reason):
            assert reason
            assert wanted or share > CAPACITY


def _without(ledger: DeviceLedger, keys: "list[ModelVersion] | tuple[ModelVersion, ...]") -> DeviceLedger:
    for key in keys:
        ledger = ledger.release(key)
    return ledger
