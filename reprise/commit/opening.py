"""The opening of an attempt: all ranks agree on what each of them saves before the first byte is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reprise.commit import disagreement
from reprise.commit.attempt import Attempt, key_of
from reprise.commit.inventory import Inventory
from reprise.commit.joint_plan import JointPlan, KnownPlans
from reprise.commit.messages import OpeningMessage, put_opening, refuse_opening
from reprise.commit.report import Offer
from reprise.errors import CheckpointError
from reprise.ranks.channel import StoreChannel


class Opening:
    """One rank's side of the opening of an attempt. Worker thread.

    Args:
        plans: those of earlier attempts of this rank's run.
    """

    def __init__(self, channel: StoreChannel, attempt: Attempt, plans: KnownPlans) -> None:
        self._channel, self._attempt, self._plans = channel, attempt, plans
        self._key = key_of(attempt.name)
        self._coordinator = f"rank {channel.coordinator}"

    def lead(self, offer: Offer, inventory: Inventory, begin: Callable[[Mapping[int, Offer]], None]) -> JointPlan:
        """Read the offers of all ranks, and let them write. Rank 0 only.

        Args:
            inventory: of what this rank saves.
            begin: called with the offers by rank before any rank writes; none writes if it raises.

        Raises:
            CheckpointError: if the ranks save different tensors or iterations, or one of them saves nothing.
            ReplicaError: if they hold different bits of the same tensor.
            LaunchError: if a rank does not answer.
        """
        ranks = self._channel.ranks[1:]
        try:
            messages = self._channel.read_all({f"{self._key}/offer/{rank}": f"rank {rank}" for rank in ranks})
            others = dict(zip(ranks, map(Offer.from_bytes, messages), strict=True))
            offers = {self._channel.rank: offer, **others}
            self._require_agreement(dict(sorted(offers.items())), inventory)
            plan = self._plans.joint(self._attempt.layout, offers)
            begin(offers)
        except BaseException as error:
            refuse_opening(self._channel, self._attempt, error)
            raise
        self._plans.delivered()
        put_opening(self._channel, self._attempt.name, OpeningMessage())
        return plan

    def join(self, offer: Offer, inventory: Inventory) -> bool:
        """Send the offer of this rank, and wait until it may write. Any rank but rank 0.

        Returns:
            False if rank 0 has decided the attempt already, as its decision says.

        Raises:
            CheckpointError: if no rank may write.
            LaunchError: if rank 0 does not answer.
        """
        self._channel.put(f"{self._key}/offer/{self._channel.rank}", offer.to_bytes())
        answer = self._answer("opened")
        if answer.witnesses is not None:
            if self._channel.rank in answer.witnesses:
                self._channel.put(f"{self._key}/table/{self._channel.rank}", inventory.to_bytes())
            answer = self._answer("opened/last")
        if answer.problem is not None:
            raise CheckpointError(answer.problem.rstrip("."))
        if not answer.is_decided:
            self._plans.delivered()
        return not answer.is_decided

    def _answer(self, name: str) -> OpeningMessage:
        return OpeningMessage.from_bytes(self._channel.read(f"{self._key}/{name}", sender=self._coordinator))

    def _require_agreement(self, offers: Mapping[int, Offer], inventory: Inventory) -> None:
        """Refuse different contents to save; two ranks that disagree send their tables."""
        problems = [f"Rank {rank}: {offer.problem}" for rank, offer in offers.items() if offer.problem is not None]
        if problems:
            raise CheckpointError(problems[0].rstrip("."))
        disagreement.refuse_other_iterations({rank: offer.iteration for rank, offer in offers.items()})
        difference = disagreement.find(offers)
        if difference is None:
            return
        witnesses = [rank for rank in difference.witnesses if rank != self._channel.rank]
        self._channel.put(f"{self._key}/opened", OpeningMessage(witnesses=witnesses).to_bytes(), is_first=False)
        tables = {
            rank: self._channel.read(f"{self._key}/table/{rank}", sender=f"rank {rank}") for rank in witnesses
        } | {self._channel.rank: inventory.to_bytes()}
        raise disagreement.explain(
            difference,
            [tables[rank] for rank in difference.witnesses],
            fix="Nothing was saved; committed checkpoints are untouched. ",
        )
