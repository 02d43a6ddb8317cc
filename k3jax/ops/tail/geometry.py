"""How the fused tail's kernel shares its work and its shared memory; needs no CuTe DSL."""

from dataclasses import dataclass
from typing import Any

from k3jax.runtime.workspace import HEADER_WORDS, TailLayout

MAX_TOKENS = 128
"""Tokens that the mailboxes are made for."""

K_BLOCKS = 8
"""Blocks of a cluster: the most that every device with clusters takes."""

ONE_SHOT_TOKENS = K_BLOCKS
"""Most tokens whose rows every rank sums for itself: one for each block of a cluster to finish."""

ONE_SHOT_ROWS = 64
"""Most rows of partial latent (tokens times ranks) that every rank sums for itself."""

MOST_GROUPS = 14
"""Clusters of a rank: 112 blocks, which fit beside one another on 132 multiprocessors."""

WARPS = 16
"""Warps of a block."""

TILE_ROWS = 16
"""Rows of the up-projection in one matrix instruction."""
STEP = 32
"""Elements of the latent that one 16-byte load a lane covers: two matrix instructions."""
FINISH_TILES = 4
"""Row tiles whose columns one warp finishes, two columns a lane."""
STREAMED_TILES = 4
"""Fewest row tiles of a block whose weights are streamed: with 2 it was slower."""
MOST_WINDOW = 5
"""Most tiles of streamed weights on their way at a time: 72 KB of a block at K3's widths.

More of them hold up every other load of the multiprocessor; fewer do not keep the memory busy.
"""
SHARED_BYTES = 232448
"""Most dynamic shared memory of a block: 227 KiB on every architecture that this is built for."""


def goes_in_two_shots(num_tokens: int, ranks: int) -> bool:
    """Whether each row is summed by one rank and sent on, rather than by every rank."""
    return num_tokens > min(ONE_SHOT_TOKENS, ONE_SHOT_ROWS // ranks)


@dataclass(frozen=True)
class TailGeometry:
    """Static facts of `TailKernel`.

    Attributes:
        ranks: R.
        latent_size: L, a multiple of 32 * k_blocks.
        hidden_size: H; H / R is a multiple of 16 * groups.
        max_tokens: M of the workspace.
        groups: clusters of a rank, each with its rows of the up-projection.
        k_blocks: blocks of a cluster, each with its slice of the latent.
        k_parts: warps that share a row tile, each with its part of the block's slice.
        streams: a warp multiplies its tile as it lands, and later tiles take its place in shared
            memory; for one round of 8 tokens at most, and k_parts 1.
        window: tiles of streamed weights that are on their way at a time.
        two_shot: a row is summed by one rank and sent on, rather than by every rank.
        warps: of a block, those that only start copies not counted; at least one for each row
            tile and part of K.
        round_tokens: tokens whose sums one block finishes in a round.
        scattered: the result is this rank's columns [T, H / R], not [T, H].
        experts_per_token: K unfinalised rows a token; 0 for a finalised latent.
    """

    ranks: int
    latent_size: int
    hidden_size: int
    max_tokens: int
    groups: int
    k_blocks: int
    k_parts: int
    two_shot: bool
    warps: int = WARPS
    round_tokens: int = 4
    streams: bool = False
    window: int = 4
    scattered: bool = False
    experts_per_token: int = 0

    @property
    def layout(self) -> TailLayout:
        """Where everything lies in a workspace."""
        return TailLayout(self.ranks, self.max_tokens, self.latent_size, self.hidden_size)

    @property
    def k_width(self) -> int:
        """Columns of the latent that a block owns."""
        return self.latent_size // self.k_blocks

    @property
    def rows(self) -> int:
        """Rows of the up-projection that a cluster owns."""
        return self.layout.columns // self.groups

    @property
    def tiles(self) -> int:
        """Row tiles of a cluster."""
        return self.rows // TILE_ROWS

    @property
    def steps(self) -> int:
        """Steps of a warp."""
        return self.k_width // (STEP * self.k_parts)

    @property
    def kept_steps(self) -> int:
        """Steps of the block's slice whose weights are in shared memory; others in registers."""
        steps = self.k_width // STEP
        if self.k_parts > 1 or self.streams:
            return steps
        room = SHARED_BYTES - self.partial_bytes - self.buffers * self.buffer_bytes - self.parts[2]
        return next(n for n in range(steps, -1, -1) if self.rows * _odd_lines(n) <= room)

    @property
    def multipliers(self) -> int:
        """Warps that multiply."""
        return self.tiles * self.k_parts - self.pairs

    @property
    def pairs(self) -> int:
        """Warps that multiply two streamed tiles, the first ones; others multiply one.

        As many as it takes to leave warps that only finish columns.
        """
        finishing = -(-self.round_tokens * self.rows // 64)
        return max(self.tiles + finishing - self.warps, 0) if self.streams else 0

    @property
    def workers(self) -> int:
        """Threads of a block that do not only start copies."""
        return 32 * self.warps

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.workers + (self.fetching_threads if self.streams else 0)

    @property
    def cluster(self) -> tuple[int, int, int]:
        """The blocks that share rows."""
        return (self.k_blocks, 1, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        """One rank's blocks; a loopback launch has `ranks` of them along the second axis."""
        return (self.k_blocks * self.groups, 1, 1)

    @property
    def chunks(self) -> int:
        """16-byte pieces of a block's slice of a row."""
        return self.k_width // 8

    @property
    def row_warps(self) -> int:
        """Warps that a block's slice of a row takes."""
        return -(-self.chunks // 32)

    @property
    def row_bytes(self) -> int:
        """Stride of a latent's slice in shared memory."""
        return _odd_lines(self.k_width // STEP)

    @property
    def weight_bytes(self) -> int:
        """Stride of a weight row's slice in shared memory."""
        return _odd_lines(self.kept_steps)

    @property
    def kept_width(self) -> int:
        """Bytes of a weight row's slice in shared memory."""
        return self.kept_steps * STEP * 2

    @property
    def eight_rows(self) -> int:
        """Bytes from a row of weights in shared memory to the eighth after it."""
        return 4 * self.kept_width if self.streams else 8 * self.weight_bytes

    @property
    def slots(self) -> int:
        """Tiles of weights that shared memory holds at a time."""
        if not self.streams:
            return self.tiles
        room = SHARED_BYTES - self.buffers * self.buffer_bytes - self.parts[2] - 64
        return min(self.tiles, room // (TILE_ROWS * self.k_width * 2))

    @property
    def odd_rows(self) -> int:
        """Where odd rows begin after the even ones, if weights are streamed.

        An odd multiple of 64 bytes, as between rows otherwise: there is no room for padding.
        """
        return self.slots * (TILE_ROWS // 2 * self.k_width * 2) + 64

    @property
    def weights_bytes(self) -> int:
        """Of all weights in shared memory."""
        if self.streams:
            return self.slots * (TILE_ROWS * self.k_width * 2) + 64
        return self.rows * self.weight_bytes

    @property
    def staged_tokens(self) -> int:
        """Rows of latents that shared memory holds: a round's, and what a cluster sums at once."""
        held = self.round_tokens * self.k_blocks
        if self.two_shot:
            return max(held, -(-self.max_tokens // (self.ranks * self.groups)))
        return held if self.round_tokens == 1 else max(held, 32)

    @property
    def partial_stride(self) -> int:
        """Floats from one token's sums by warps to the next: bank conflicts are what 4 avoids."""
        return self.k_parts * self.rows + 4

    @property
    def partial_bytes(self) -> int:
        """A round's sums by warps: [round_tokens * k_blocks, k_parts, rows] float32, padded.

        None if weights are streamed: a warp sends its sums as they are.
        """
        if self.streams:
            return 0
        return self.round_tokens * self.k_blocks * self.partial_stride * 4

    @property
    def buffers(self) -> int:
        """Buffers of sums by blocks: rounds of tokens take turns."""
        return 1 if self.streams else 2

    @property
    def buffer_bytes(self) -> int:
        """One buffer of sums by blocks: [round_tokens, k_blocks, rows] float32."""
        return self.round_tokens * self.k_blocks * self.rows * 4

    @property
    def squares_bytes(self) -> int:
        """Sums of squares: [staged_tokens, k_blocks, row_warps] float32."""
        return self.staged_tokens * self.k_blocks * self.row_warps * 4

    @property
    def fetching_warps(self) -> int:
        """The last warps, which start the copies of weights: one takes 28 ns a copy, two 17.

        If weights are streamed, these warps do nothing else.
        """
        return min(2, self.warps // 2)

    @property
    def fetching_threads(self) -> int:
        """Threads of these warps."""
        return 32 * self.fetching_warps

    @property
    def reads_all(self) -> bool:
        """Whether a warp reads its weights into registers before the product: all are kept."""
        return self.k_parts > 1

    @property
    def reads_early(self) -> bool:
        """Whether it does so before the norm: no room beside 16 tokens or rows of experts."""
        return self.reads_all and self.token_tiles == 1 and not self.experts_per_token

    @property
    def looks_at_peers_alone(self) -> bool:
        """Whether a poll leaves out this rank's own words when it looks again.

        Of two ranks' words they are half; with more ranks it was not tried.
        """
        return self.streams and self.ranks == 2

    @property
    def sum_barriers(self) -> int:
        """Barriers of sums by blocks: of each buffer, or of what each warp finishes."""
        return -(-self.tiles // FINISH_TILES) if self.streams else self.buffers

    @property
    def barriers(self) -> int:
        """Offset in shared memory of the barriers, after the header."""
        return HEADER_WORDS * 4

    @property
    def num_barriers(self) -> int:
        """Of the header, of the squares, of sums, of each tile of weights, and of each tile whose
        place another takes.
        """
        return 2 + self.sum_barriers + self.tiles + self.tiles - self.slots

    @property
    def parts(self) -> tuple[int, int, int]:
        """Offsets in shared memory of squares, latents, weights."""
        squares = self.barriers + 256
        latents = squares + -(-self.squares_bytes // 128) * 128
        return squares, latents, latents + self.staged_tokens * self.row_bytes

    @property
    def partials(self) -> int:
        """Offset of the sums by warps."""
        return self.parts[2] + self.weights_bytes

    @property
    def sums(self) -> int:
        """Offset of the two buffers of sums by blocks."""
        return self.partials + self.partial_bytes

    @property
    def shared_bytes(self) -> int:
        """All of it."""
        return self.sums + self.buffers * self.buffer_bytes

    @property
    def result_width(self) -> int:
        """Columns of the result."""
        return self.layout.columns if self.scattered else self.hidden_size

    @property
    def grid_threads(self) -> int:
        """Threads of one rank."""
        return self.grid[0] * self.workers

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens that a warp multiplies at once, to read each weight half as often."""
        return min(self.round_tokens * self.k_blocks // 8, 2) or 1


def _odd_lines(steps: int) -> int:
    """Stride of rows of some steps in shared memory: an odd multiple of 64 bytes.

    The eight lanes of one phase of a 16-byte read (2 rows x 4 lanes) then never collide.
    """
    return 64 * (steps | 1)


def kernel_facts(
    ranks: int, latent_size: int, hidden_size: int, num_tokens: int, experts_per_token: int = 0
) -> dict[str, Any]:
    """The geometry of a call, as arguments of `TailKernel`.

    Eight blocks of a cluster split K, clusters split the rows, and a block's warps split its row
    tiles and, while there are warps, its slice of K once more. More tokens take more shared memory.

    Raises:
        ValueError: the widths do not split that way.
    """
    tiles, odd_rows = divmod(hidden_size, ranks * TILE_ROWS)
    steps, odd_columns = divmod(latent_size, K_BLOCKS * STEP)
    if odd_rows or odd_columns or not tiles:
        raise ValueError(
            f"hidden_size={hidden_size} must be a multiple of {ranks * TILE_ROWS} (ranks * "
            f"{TILE_ROWS}) and latent_size={latent_size} one of {K_BLOCKS * STEP}"
        )
    groups = max(n for n in range(1, MOST_GROUPS + 1) if tiles % n == 0)
    fitting = [n for n in range(1, steps + 1) if steps % n == 0 and tiles // groups * n <= WARPS]
    if not fitting:
        raise ValueError(
            f"hidden_size={hidden_size} over ranks={ranks} leaves {tiles // groups} row tiles a "
            f"block, more than its {WARPS} warps"
        )
    facts = {
        "ranks": ranks,
        "latent_size": latent_size,
        "hidden_size": hidden_size,
        "max_tokens": MAX_TOKENS,
        "groups": groups,
        "k_blocks": K_BLOCKS,
        "k_parts": max(fitting),
        "warps": WARPS,
        # More tokens a round than this spill registers: fewer ranks hold more rows each.
        "round_tokens": 1 if num_tokens <= K_BLOCKS else min(ranks, 8),
        "two_shot": goes_in_two_shots(num_tokens, ranks),
        "experts_per_token": experts_per_token,
    }
    # Beside the partials of 8 ranks and rows of experts, registers have no room for more warps.
    crowded = experts_per_token > 0 and ranks >= 8
    if num_tokens <= K_BLOCKS and tiles // groups >= STREAMED_TILES and not crowded:
        window = max(min(MOST_WINDOW, tiles // groups // 2), 1)
        streamed = facts | {"k_parts": 1, "streams": True, "window": window}
        geometry = TailGeometry(**streamed)
        if geometry.tiles <= 2 * geometry.slots:  # a place is taken once more
            return streamed
    return facts
