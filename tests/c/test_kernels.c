/* Copy kernels (csrc/kernels/kernels.h): the bytes that pack, unpack and gradient pack write or
 * leave unchanged, and the arguments that they refuse. test_casts.c covers conversions.
 *
 * Layouts are random with a fixed seed, which a failure prints. Every destination is one arena that
 * is compared as a whole, so a write outside its range fails too. With -DFCK_TEST_CUDA_ON_HOST, and
 * linked with kernels_cuda.cu compiled against fake_cuda/cuda_runtime.h, the same tests run the
 * CUDA kernels as well. */
#include "kernels_reference.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

/* ---- pack ---- */

typedef struct pack_case {
    fck_segment segment[200];
    unsigned char *source_memory[200]; /* memory that segment.src points into; owned */
    int64_t dst_offset[200];
    int64_t arena_bytes;
    size_t count;
} pack_case;

/* Creates segments of random dtypes, sizes and addresses. The addresses of conversions are
 * multiples of the element size, as a GPU requires. The destinations of copies have any address.
 * Destinations have random gaps. */
static void pack_case_init(pack_case *c, random_state *random) {
    c->count = (size_t)draw_between(random, 0, draw(random) % 8 == 0 ? 200 : 12);
    c->arena_bytes = GUARD;
    for (size_t i = 0; i < c->count; i++) {
        fck_segment *s = &c->segment[i];
        const int moved = draw(random) % 2 == 0;
        static const fck_dtype movable[] = {FCK_UINT8,    FCK_BOOL,    FCK_COMPLEX128, FCK_FLOAT16,
                                            FCK_BFLOAT16, FCK_FLOAT32, FCK_FLOAT64};
        s->src_dtype = moved ? movable[draw(random) % 7] : FLOATS[draw(random) % FLOAT_TYPES];
        s->dst_dtype = moved ? s->src_dtype : FLOATS[draw(random) % FLOAT_TYPES];
        s->itemsize = (int32_t)size_of(s->src_dtype);
        s->count = draw_size(random);
        const int64_t shift = moved ? 0 : draw_between(random, 0, 9);
        c->source_memory[i] = new_elements(random, s->src_dtype, s->count + shift);
        s->src = c->source_memory[i] + shift * s->itemsize;
        const int64_t unit = moved ? 1 : size_of(s->dst_dtype);
        const int64_t at = c->arena_bytes + draw_between(random, 0, 20);
        c->dst_offset[i] = (at + unit - 1) / unit * unit;
        c->arena_bytes = c->dst_offset[i] + s->count * size_of(s->dst_dtype);
    }
    c->arena_bytes += GUARD;
}

static void pack_case_fini(pack_case *c) {
    for (size_t i = 0; i < c->count; i++) {
        free(c->source_memory[i]);
    }
}

static void pack_writes_every_segment_and_nothing_else(void **state) {
    (void)state;
    static pack_case c;
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        random_state random = {seed};
        pack_case_init(&c, &random);
        unsigned char *expected = new_bytes(c.arena_bytes, UNTOUCHED);
        for (size_t i = 0; i < c.count; i++) {
            const fck_segment *s = &c.segment[i];
            reference_copy((const unsigned char *)s->src, s->src_dtype, expected + c.dst_offset[i],
                           s->dst_dtype, s->count);
        }
        FOR_EACH_BACKEND(backend) {
            unsigned char *actual = new_bytes(c.arena_bytes, UNTOUCHED);
            for (size_t i = 0; i < c.count; i++) {
                c.segment[i].dst = actual + c.dst_offset[i];
            }
            assert_null(backend->pack(c.segment, c.count, NULL));
            assert_same_bytes(actual, expected, c.arena_bytes, backend, seed);
            free(actual);
        }
        free(expected);
        pack_case_fini(&c);
    }
}

/* Moves `bytes` bytes between addresses that exceed multiples of 16 by `from` and `to`. The source
 * is an allocation of its own. ASan reports reads behind its last byte, and reads more than 7 bytes
 * before its first. */
static void check_move(random_state *random, int64_t from, int64_t to, int64_t bytes) {
    unsigned char *memory = new_elements(random, FCK_UINT8, from + bytes);
    const int64_t arena_bytes = GUARD + to + bytes + GUARD;
    unsigned char *expected = new_bytes(arena_bytes, UNTOUCHED);
    memcpy(expected + GUARD + to, memory + from, (size_t)bytes);
    FOR_EACH_BACKEND(backend) {
        unsigned char *actual = new_bytes(arena_bytes, UNTOUCHED);
        assert_true((uintptr_t)memory % 16 == 0 && (uintptr_t)actual % 16 == 0);
        const fck_segment segment = {memory + from, actual + GUARD + to, bytes, 1, FCK_UINT8,
                                     FCK_UINT8};
        ASAN_POISON_MEMORY_REGION(memory, (size_t)(from / 8 * 8));
        assert_null(backend->pack(&segment, 1, NULL));
        ASAN_UNPOISON_MEMORY_REGION(memory, (size_t)(from / 8 * 8));
        assert_same_bytes(actual, expected, arena_bytes, backend, (uint64_t)(from * 16 + to));
        free(actual);
    }
    free(expected);
    free(memory);
}

static void pack_moves_between_any_two_alignments_and_reads_only_the_source(void **state) {
    (void)state;
    random_state random = {5};
    for (int64_t from = 0; from < 16; from++) {
        for (int64_t to = 0; to < 16; to++) {
            for (int64_t bytes = 496; bytes < 560; bytes++) {
                check_move(&random, from, to, bytes);
            }
            check_move(&random, from, to, draw_between(&random, 1, 495));
            check_move(&random, from, to, FCK_TILE_BYTES + draw_between(&random, 0, 600));
        }
    }
}

static void pack_accepts_null_pointers_of_empty_segment(void **state) {
    (void)state;
    FOR_EACH_BACKEND(backend) {
        const fck_segment segments[] = {{NULL, NULL, 0, 4, FCK_FLOAT32, FCK_FLOAT32},
                                        {NULL, NULL, 0, 4, FCK_FLOAT32, FCK_BFLOAT16},
                                        {NULL, NULL, 0, 8, FCK_FLOAT64, FCK_BFLOAT16}};
        assert_null(backend->pack(segments, 3, NULL));
        assert_null(backend->pack(NULL, 0, NULL));
    }
}

static void pack_with_unsupported_cast_fails_and_writes_nothing(void **state) {
    (void)state;
    FOR_EACH_BACKEND(backend) {
        const float src[2] = {1, 2};
        float dst[4] = {7, 7, 7, 7};
        const fck_segment segments[] = {{src, dst, 2, 4, FCK_FLOAT32, FCK_FLOAT32},
                                        {src, dst + 2, 2, 4, FCK_FLOAT32, FCK_UINT8}};
        assert_string_equal(backend->pack(segments, 2, NULL),
                            "these element types can be moved but not converted");
        const fck_gradient gradients[] = {{src, 2, 2, 0, 1, 4, FCK_FLOAT32},
                                          {src, 2, 2, 2, 1, 4, FCK_BOOL}};
        assert_string_equal(backend->pack_gradients(gradients, 2, 1, dst, 4, FCK_FLOAT32, NULL),
                            "these element types can be moved but not converted");
        for (int i = 0; i < 4; i++) {
            assert_true(dst[i] == 7);
        }
    }
}

/* Byte-granular storage offsets can misalign an element. The CPU accepts that; a GPU returns an
 * error. */
static void pack_casts_misaligned_elements_on_cpu_only(void **state) {
    (void)state;
    random_state random = {3};
    const int64_t count = 61;
    for (size_t from = 0; from < FLOAT_TYPES; from++) {
        for (size_t to = 0; to < FLOAT_TYPES; to++) {
            unsigned char *elements = new_elements(&random, FLOATS[from], count);
            unsigned char *src = new_bytes(count * size_of(FLOATS[from]) + 1, 0);
            unsigned char *dst = new_bytes(count * size_of(FLOATS[to]) + 2, UNTOUCHED);
            unsigned char *expected = new_bytes(count * size_of(FLOATS[to]) + 2, UNTOUCHED);
            memcpy(src + 1, elements, (size_t)(count * size_of(FLOATS[from])));
            reference_copy(elements, FLOATS[from], expected + 1, FLOATS[to], count);
            const fck_segment segment = {
                src + 1, dst + 1, count, (int32_t)size_of(FLOATS[from]), FLOATS[from], FLOATS[to]};
#ifdef FCK_TEST_CUDA_ON_HOST
            if (from != to) {
                assert_string_equal(
                    fck_cuda()->pack(&segment, 1, NULL),
                    "a conversion needs addresses that are multiples of the element size");
            }
#endif
            assert_null(fck_cpu()->pack(&segment, 1, NULL));
            assert_same_bytes(dst, expected, count * size_of(FLOATS[to]) + 2, fck_cpu(), 3);
            free(elements);
            free(src);
            free(dst);
            free(expected);
        }
    }
}

/* ---- unpack ---- */

static void unpack_concatenates_each_slot_over_ranks(void **state) {
    (void)state;
    enum { SLOTS = 150 };
    static fck_slot slots[SLOTS];
    static int64_t dst_offset[SLOTS];
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        random_state random = {seed + 1000};
        const int64_t world = draw_between(&random, 1, draw(&random) % 4 == 0 ? 70 : 9);
        const size_t count = (size_t)draw_between(&random, 0, draw(&random) % 8 == 0 ? SLOTS : 10);
        int64_t rank_bytes = 0;
        int64_t arena_bytes = GUARD;
        for (size_t i = 0; i < count; i++) {
            rank_bytes += draw(&random) % 2 ? 0 : draw_between(&random, 0, 20);
            slots[i].offset = rank_bytes;
            slots[i].bytes = world > 9 ? draw_between(&random, 0, 40) : draw_size(&random);
            slots[i].blocks = draw_blocks(&random, slots[i].bytes);
            rank_bytes += slots[i].bytes * slots[i].blocks;
            dst_offset[i] = arena_bytes + draw_between(&random, 0, 20);
            arena_bytes = dst_offset[i] + world * slots[i].bytes * slots[i].blocks;
        }
        arena_bytes += GUARD;
        unsigned char *gathered = new_elements(&random, FCK_UINT8, world * rank_bytes);
        unsigned char *expected = new_bytes(arena_bytes, UNTOUCHED);
        for (size_t i = 0; i < count; i++) {
            unsigned char *to = expected + dst_offset[i];
            for (int64_t part = 0; part < slots[i].blocks * world; part++) {
                const int64_t from = slots[i].offset + part / world * slots[i].bytes;
                for (int64_t k = 0; k < slots[i].bytes; k++) {
                    *to++ = gathered[part % world * rank_bytes + from + k];
                }
            }
        }
        FOR_EACH_BACKEND(backend) {
            unsigned char *actual = new_bytes(arena_bytes, UNTOUCHED);
            for (size_t i = 0; i < count; i++) {
                slots[i].dst = slots[i].bytes > 0 ? actual + dst_offset[i] : NULL;
            }
            assert_null(backend->unpack(gathered, rank_bytes, world, slots, count, NULL));
            assert_same_bytes(actual, expected, arena_bytes, backend, seed + 1000);
            free(actual);
        }
        free(gathered);
        free(expected);
    }
}

/* ---- gradients ---- */

typedef struct gradient_case {
    fck_gradient gradient[150];
    unsigned char *source_memory[150]; /* memory that gradient.src points into; owned */
    size_t count;
    int64_t world;
    int64_t rank_numel;
    fck_dtype dst_dtype;
} gradient_case;

/* Chunks as in FSDP (ceil(numel / world), so late ranks may have few or no elements), sometimes
 * larger or zero. Gradients may have fewer elements than the world, none, or different dtypes. */
static void gradient_case_init(gradient_case *c, random_state *random) {
    c->world = draw_between(random, 1, draw(random) % 4 == 0 ? 70 : 9);
    c->count = (size_t)draw_between(random, 0, draw(random) % 8 == 0 ? 150 : 10);
    c->dst_dtype = FLOATS[draw(random) % FLOAT_TYPES];
    c->rank_numel = draw_between(random, 0, 3);
    for (size_t i = 0; i < c->count; i++) {
        fck_gradient *g = &c->gradient[i];
        g->src_dtype = draw(random) % 2 ? c->dst_dtype : FLOATS[draw(random) % FLOAT_TYPES];
        g->itemsize = (int32_t)size_of(g->src_dtype);
        g->numel = draw_size(random);
        g->chunk = (g->numel + c->world - 1) / c->world;
        if (draw(random) % 8 == 0) {
            g->chunk += draw_between(random, 0, 30);
        }
        g->offset = c->rank_numel + draw_between(random, 0, 3);
        g->blocks = draw_blocks(random, g->numel);
        c->rank_numel = g->offset + g->blocks * g->chunk;
        const int64_t shift = draw_between(random, 0, 9);
        c->source_memory[i] = new_elements(random, g->src_dtype, g->blocks * g->numel + shift);
        g->src = g->numel > 0 ? c->source_memory[i] + shift * g->itemsize : NULL;
    }
    c->rank_numel += draw_between(random, 0, 3);
}

/* Computes the expected slots: element r * chunk + k of each block, or zero past its end. Gaps stay
 * unchanged. */
static void gradient_case_expect(const gradient_case *c, unsigned char *dst) {
    const int64_t size = size_of(c->dst_dtype);
    for (size_t i = 0; i < c->count; i++) {
        const fck_gradient *g = &c->gradient[i];
        for (int64_t part = 0; part < c->world * g->blocks; part++) {
            const int64_t r = part / g->blocks;
            const int64_t b = part % g->blocks;
            for (int64_t k = 0; k < g->chunk; k++) {
                const int64_t at = r * c->rank_numel + g->offset + b * g->chunk + k;
                unsigned char *slot = dst + at * size;
                const int64_t element = r * g->chunk + k;
                if (element < g->numel) {
                    const unsigned char *from =
                        (const unsigned char *)g->src + (b * g->numel + element) * g->itemsize;
                    reference_copy(from, g->src_dtype, slot, c->dst_dtype, 1);
                } else {
                    memset(slot, 0, (size_t)size);
                }
            }
        }
    }
}

static void pack_gradients_distributes_to_ranks_and_pads_with_zeros(void **state) {
    (void)state;
    static gradient_case c;
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        random_state random = {seed + 2000};
        gradient_case_init(&c, &random);
        const int64_t size = size_of(c.dst_dtype);
        const int64_t bytes = c.world * c.rank_numel * size + 2 * GUARD;
        unsigned char *expected = new_bytes(bytes, UNTOUCHED);
        gradient_case_expect(&c, expected + GUARD + size);
        FOR_EACH_BACKEND(backend) {
            unsigned char *actual = new_bytes(bytes, UNTOUCHED);
            assert_null(backend->pack_gradients(c.gradient, c.count, c.world, actual + GUARD + size,
                                                c.rank_numel, c.dst_dtype, NULL));
            assert_same_bytes(actual, expected, bytes, backend, seed + 2000);
            free(actual);
        }
        free(expected);
        for (size_t i = 0; i < c.count; i++) {
            free(c.source_memory[i]);
        }
    }
}

/* Edge cases of FSDP with explicit numbers. Five rank shards of [2 | 1 | 0] elements: 7 elements in
 * chunks of 2, one element for five ranks, and a parameter without elements. */
static void pack_gradients_of_uneven_small_and_empty_gradients_match_example(void **state) {
    (void)state;
    const float uneven[7] = {1, 2, 3, 4, 5, 6, 7};
    const double single[1] = {9};
    static const float rank_shards[5][3] = {{1, 2, 9}, {3, 4, 0}, {5, 6, 0}, {7, 0, 0}, {0, 0, 0}};
    FOR_EACH_BACKEND(backend) {
        float dst[5][3];
        memset(dst, UNTOUCHED, sizeof dst);
        const fck_gradient gradients[] = {{uneven, 7, 2, 0, 1, 4, FCK_FLOAT32},
                                          {single, 1, 1, 2, 1, 8, FCK_FLOAT64},
                                          {NULL, 0, 0, 3, 1, 4, FCK_FLOAT32}};
        assert_null(backend->pack_gradients(gradients, 3, 5, dst, 3, FCK_FLOAT32, NULL));
        assert_memory_equal(dst, rank_shards, sizeof dst);
        assert_null(backend->pack_gradients(gradients + 2, 1, 5, NULL, 0, FCK_FLOAT32, NULL));
    }
}

/* An unused parameter has a chunk, and a gradient of numel 0. Its slots contain only padding. */
static void pack_gradients_writes_zeros_for_missing_gradient(void **state) {
    (void)state;
    FOR_EACH_BACKEND(backend) {
        uint16_t dst[6] = {1, 1, 1, 1, 1, 1};
        const uint16_t zeros[6] = {0};
        const fck_gradient gradient = {NULL, 0, 3, 0, 1, 4, FCK_FLOAT32};
        assert_null(backend->pack_gradients(&gradient, 1, 2, dst, 3, FCK_BFLOAT16, NULL));
        assert_memory_equal(dst, zeros, sizeof dst);
    }
}

/* ---- index arithmetic of the CUDA grid ---- */

static void tiles_cover_every_item_of_every_line_exactly_once(void **state) {
    (void)state;
    random_state random = {4};
    for (int round = 0; round < 400; round++) {
        const int64_t tile_items = draw_between(&random, 1, 64);
        const int64_t items = draw_between(&random, 1, draw(&random) % 2 ? 5 : 300);
        const uint32_t lines = (uint32_t)draw_between(&random, 1, 80);
        unsigned char *visits = new_bytes(lines * items, 0);
        const fck_cut cut = fck_cut_of(items, tile_items, 256);
        const int64_t tiles = fck_tile_count(cut, lines);
        for (uint32_t index = 0; index < tiles; index++) {
            const fck_tile tile = fck_tile_at(cut, items, tile_items, lines, index);
            assert_true(tile.end_line > tile.first_line && tile.end_line <= lines);
            assert_true(tile.end > tile.begin && tile.end <= items);
            assert_true((tile.end_line - tile.first_line) * (tile.end - tile.begin) <= tile_items);
            for (int64_t line = tile.first_line; line < tile.end_line; line++) {
                for (int64_t k = tile.begin; k < tile.end; k++) {
                    visits[line * items + k]++;
                }
            }
        }
        for (int64_t i = 0; i < lines * items; i++) {
            assert_int_equal(visits[i], 1);
        }
        free(visits);
    }
}

/* 64 ranks with 32 bytes each are one tile, and so are a thousand blocks of 16 bytes. */
static void short_lines_share_one_tile(void **state) {
    (void)state;
    assert_int_equal(fck_tile_count(fck_cut_of(32, FCK_TILE_BYTES, 256), 64), 1);
    assert_int_equal(fck_tile_count(fck_cut_of(16, FCK_TILE_BYTES, 256), 1000), 1);
    assert_int_equal(fck_tile_count(fck_cut_of(16, FCK_TILE_BYTES, 256), 1025), 2);
    assert_int_equal(fck_tile_count(fck_cut_of(FCK_TILE_BYTES + 1, FCK_TILE_BYTES, 256), 3), 6);
}

static void tile_has_teams_for_all_its_lines_and_less_than_half_are_idle(void **state) {
    (void)state;
    for (int64_t items = 1; items < 20000; items++) {
        const fck_cut cut = fck_cut_of(items, FCK_TILE_BYTES, 256);
        const int threads = 1 << cut.team_bits; /* of a team, which moves one line at a time */
        const int teams = 256 / threads;
        assert_true(threads <= 256);
        assert_true(threads == 1 || teams >= cut.lines_per_tile);
        assert_true(teams == 1 || teams < 2 * cut.lines_per_tile);
    }
}

static void tile_index_maps_to_owning_job(void **state) {
    (void)state;
    const uint32_t first[] = {0, 1, 5, 6, 100};
    for (int32_t count = 1; count <= 5; count++) {
        for (uint32_t index = 0; index < 120; index++) {
            int32_t owner = 0;
            for (int32_t i = 0; i < count; i++) {
                owner = first[i] <= index ? i : owner;
            }
            assert_int_equal(fck_find_job(first, count, index), owner);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pack_writes_every_segment_and_nothing_else),
        cmocka_unit_test(pack_moves_between_any_two_alignments_and_reads_only_the_source),
        cmocka_unit_test(pack_accepts_null_pointers_of_empty_segment),
        cmocka_unit_test(pack_with_unsupported_cast_fails_and_writes_nothing),
        cmocka_unit_test(pack_casts_misaligned_elements_on_cpu_only),
        cmocka_unit_test(unpack_concatenates_each_slot_over_ranks),
        cmocka_unit_test(pack_gradients_distributes_to_ranks_and_pads_with_zeros),
        cmocka_unit_test(pack_gradients_of_uneven_small_and_empty_gradients_match_example),
        cmocka_unit_test(pack_gradients_writes_zeros_for_missing_gradient),
        cmocka_unit_test(tiles_cover_every_item_of_every_line_exactly_once),
        cmocka_unit_test(short_lines_share_one_tile),
        cmocka_unit_test(tile_has_teams_for_all_its_lines_and_less_than_half_are_idle),
        cmocka_unit_test(tile_index_maps_to_owning_job),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
