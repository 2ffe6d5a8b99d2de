/* The negotiation of a process group: csrc/transport/negotiation.c, over gloo's collectives.
 *
 * A rank is a process with the locals `me` (its rank), `pg` (the process group of the current call)
 * and `err`. An inline that fails sets `err`, as the C function returns -1. The file that includes
 * this one sets RANKS and PROCESS_GROUPS. MAY_REACH_GLOO(kind) is false if a rank must not issue
 * this kind of collective over gloo. TIME_LIMIT_ENDS_WAITS is true if the time limit may end
 * a wait. Locals are set to 0 after their last use, so that equal states are merged.
 *
 * Gloo's collectives of a process group match by their order of issue. A collective completes if
 * all ranks have issued it, and fails if a rank has ended before it issued it. */
#include "ranks.pml"

/* Indices of the arrays of process group `pg`: of this rank, and of rank r. */
#define MINE (me * PROCESS_GROUPS + pg)
#define ENTRY_OF(r) ((r) * PROCESS_GROUPS + pg)
#if RANKS == 2
#define LARGEST(a) (a[ENTRY_OF(0)] > a[ENTRY_OF(1)] -> a[ENTRY_OF(0)] : a[ENTRY_OF(1)])
#else
#define LARGER(a, b) (a > b -> a : b)
#define LARGEST(a) LARGER(a[ENTRY_OF(0)], LARGER(a[ENTRY_OF(1)], a[ENTRY_OF(2)]))
#endif

/* Kinds of gloo's collectives: a round, or KIND_OF_OP + the tag of a gather or a reduction. */
#define KIND_ROUND_1 1
#define KIND_ROUND_2 2
#define KIND_PLAN 3
#define KIND_OF_OP 4

#define ENTRIES (RANKS * PROCESS_GROUPS)
#define WINDOW 8 /* collectives by which a rank may be ahead */

byte gloo_count[ENTRIES]; /* collectives that a rank has issued over gloo */
byte gloo_kind[PROCESS_GROUPS * WINDOW];
bit gloo_broken;     /* collectives of different kinds met: gloo ends the process */
bit shifted;         /* a rank left out or repeated a collective */
bit diverged;        /* a rank issued another collective, or has another plan */

/* ---- gloo ---- */

#define HAS_ISSUED(r) (gloo_count[ENTRY_OF(r)] > index)
#define IS_LOST(r) (gone[r] && gloo_count[ENTRY_OF(r)] <= index)

/* Issues a collective. `index` is its number. */
inline gloo_issue(kind) {
    d_step {
        assert(MAY_REACH_GLOO(kind));
        index = gloo_count[MINE];
        gloo_count[MINE]++;
        if
        :: gloo_kind[pg * WINDOW + index % WINDOW] == 0 ->
            gloo_kind[pg * WINDOW + index % WINDOW] = kind
        :: else ->
            if
            :: gloo_kind[pg * WINDOW + index % WINDOW] != kind ->
                /* gloo would end the process by a signal */
                assert(shifted || diverged);
                gloo_broken = 1
            :: else
            fi
        fi;
        if
        :: ALL(HAS_ISSUED) -> gloo_kind[pg * WINDOW + index % WINDOW] = 0
        :: else
        fi
    }
}

/* fct_exchange_wait, fct_work_wait: waits for collective `awaited` of gloo. */
inline gloo_wait(awaited) {
    index = awaited;
    if
    :: atomic { gone[me] -> index = 0; err = DEATH }
    :: atomic { !gone[me] && signaled[me] -> signaled[me] = 0; index = 0; err = INTERRUPT }
    :: atomic { !gone[me] && ALL(HAS_ISSUED) && !gloo_broken -> index = 0 }
    :: atomic { !gone[me] && (gloo_broken || (!ALL(HAS_ISSUED) && ANY(IS_LOST))) ->
        index = 0;
        err = CLOSED }
    :: atomic { timeout && TIME_LIMIT_ENDS_WAITS -> index = 0; err = CLOSED }
    fi
}

/* ---- negotiation ---- */

#define PENDING 0
#define CONNECTING 1
#define ACCEPTED 2
#define DECLINED 3

/* This rank's part of round 1 and round 2. */
byte registered[ENTRIES]; /* parameter groups */
bit accepts[ENTRIES];
bit connects[ENTRIES];
byte plan[ENTRIES]; /* hash of the first plan; 0: none */
bit waits[ENTRIES];

/* struct shm_negotiation */
byte state[ENTRIES];
byte gathers[ENTRIES];
byte fallback_gathers[ENTRIES];
byte connected_after[ENTRIES];
byte capabilities[ENTRIES]; /* number of round 1 in gloo's order; NONE: not issued, or read */
byte connection[ENTRIES];   /* of round 2 */
bit compares[ENTRIES];
bit compares_later_plans[ENTRIES];
bit has_first_result[ENTRIES];
bit first_differs[ENTRIES];

#define ACCEPTS(r) accepts[ENTRY_OF(r)]
#define WAITS(r) waits[ENTRY_OF(r)]
#define HAS_PLAN(r) (plan[ENTRY_OF(r)] != 0)
#define DIFFERS(r) \
    (plan[ENTRY_OF(r)] != 0 && plan[ENTRY_OF(0)] != 0 && plan[ENTRY_OF(r)] != plan[ENTRY_OF(0)])
#define CONNECTS(r) connects[ENTRY_OF(r)]
#define HAS_ENDED(r) gone[r]

/* start_negotiation */
inline start_negotiation() {
    gloo_issue(KIND_ROUND_1);
    d_step {
        capabilities[MINE] = index;
        fallback_gathers[MINE] = registered[MINE];
        index = 0
    }
}

/* read_capabilities: waits for round 1 and applies its results. */
inline read_capabilities() {
    gloo_wait(capabilities[MINE]);
    if
    :: err == 0 ->
        d_step {
            capabilities[MINE] = NONE;
#ifndef WITHOUT_FALLBACK_IS_LARGEST
            fallback_gathers[MINE] = LARGEST(registered);
#endif
            if
#ifdef WITHOUT_ALL_RANKS_WAIT
            :: waits[MINE] -> fallback_gathers[MINE] = 0
#else
            :: ALL(WAITS) -> fallback_gathers[MINE] = 0
#endif
            :: else
            fi;
            compares[MINE] = ALL(HAS_PLAN);
            compares_later_plans[MINE] = ALL(HAS_PLAN) && ALL(WAITS);
            has_first_result[MINE] = 1;
#ifndef WITHOUT_PLAN_IS_COMPARED
            first_differs[MINE] = ANY(DIFFERS);
#endif
            if
            :: ALL(ACCEPTS) -> state[MINE] = CONNECTING
            :: else -> state[MINE] = DECLINED
            fi
        }
#ifdef WITHOUT_INTERRUPTED_ROUND_IS_KEPT
    :: err == INTERRUPT -> capabilities[MINE] = NONE
#endif
    :: else
    fi
}

/* connect_ranks: maps the peers' rings and issues round 2. */
inline connect_ranks() {
    d_step {
        if
        :: ANY(HAS_ENDED) -> connects[MINE] = 0
        :: else
        fi;
        connected_after[MINE] = gathers[MINE] + fallback_gathers[MINE]
    }
    gloo_issue(KIND_ROUND_2);
    d_step {
        connection[MINE] = index;
        index = 0
    }
}

/* read_connection: waits for round 2 and applies its results. */
inline read_connection() {
    gloo_wait(connection[MINE]);
    if
    :: err == 0 ->
        d_step {
            connection[MINE] = NONE;
            if
#ifdef WITHOUT_ALL_RANKS_CONNECT
            :: connects[MINE] -> state[MINE] = ACCEPTED
#else
            :: ALL(CONNECTS) -> state[MINE] = ACCEPTED
#endif
            :: else -> state[MINE] = DECLINED
            fi
        }
    :: else
    fi
}

#ifdef WITHOUT_ROUNDS_ARE_READ_LATE
#define MAY_READ_1 true
#define MAY_READ_2(gather) true
#else
#define MAY_READ_1 (gathers[MINE] >= fallback_gathers[MINE])
#define MAY_READ_2(gather) (!(gather && gathers[MINE] < connected_after[MINE]))
#endif

/* shm_negotiation_run before a gather (`gather`) or a reduction. */
inline run_negotiation(gather) {
    if
    :: err == 0 && state[MINE] == PENDING && capabilities[MINE] == NONE -> start_negotiation()
    :: else
    fi;
    if
    :: err == 0 && state[MINE] == PENDING && (!(gather) || MAY_READ_1) -> read_capabilities()
    :: else
    fi;
    if
    :: err == 0 && state[MINE] == CONNECTING && connection[MINE] == NONE &&
       !(gather && gathers[MINE] < fallback_gathers[MINE]) -> connect_ranks()
    :: else
    fi;
    if
    :: err == 0 && state[MINE] == CONNECTING && connection[MINE] != NONE && (gather) &&
       MAY_READ_2(gather) -> read_connection()
    :: else
    fi
}

/* settle_rounds */
inline settle_rounds() {
    if
    :: state[MINE] == PENDING -> read_capabilities()
    :: else
    fi;
    if
    :: err == 0 && state[MINE] == CONNECTING && fallback_gathers[MINE] == 0 ->
        if
        :: connection[MINE] == NONE -> connect_ranks()
        :: else
        fi;
        read_connection()
    :: else
    fi
}

#ifdef SECOND_ROOT
byte later_plan[ENTRIES]; /* number of the exchange of the second root's plan; NONE: not issued */

/* compare_later_plan */
inline compare_later_plan(rank_waits) {
    if
    :: !compares_later_plans[MINE] || state[MINE] == ACCEPTED -> equal = 1
    :: else ->
        if
        :: later_plan[MINE] == NONE -> gloo_issue(KIND_PLAN); later_plan[MINE] = index; index = 0
        :: else
        fi;
        if
        :: rank_waits -> gloo_wait(later_plan[MINE]); equal = (err == 0)
        :: else
        fi
    fi
}
#else
#define compare_later_plan(rank_waits) skip
#endif

#define HAS_OTHER_FIRST_PLAN (plan[MINE] != 0 && compares[MINE] && first_differs[MINE])

/* shm_negotiation_compare_plan. `is_first`: the plan of round 1. Sets `equal` if the plans are
 * equal or are not compared, and `err` to PLAN if they differ. Sets neither before the results
 * arrive. */
inline compare_plan(is_first, rank_waits) {
    equal = 0;
    if
    :: state[MINE] == PENDING && capabilities[MINE] == NONE -> start_negotiation()
    :: else
    fi;
    if
    :: capabilities[MINE] != NONE && !(rank_waits) && (is_first)
#ifndef WITHOUT_LATER_PLAN_NEEDS_WAITS
    :: !(is_first) && !waits[MINE] -> equal = 1
#endif
    :: else ->
        settle_rounds();
        if
        :: err == 0 && !(is_first) -> compare_later_plan(rank_waits)
        :: err == 0 && (is_first) && HAS_OTHER_FIRST_PLAN -> err = PLAN
        :: err == 0 && (is_first) && !HAS_OTHER_FIRST_PLAN -> equal = 1
        :: else
        fi
    fi
}

/* fct_pg_all_gather and others over gloo. */
inline count_gather() {
    gathers[MINE]++
}
