/* Capabilities of this process, from environment variables and the operating system. */
#ifndef FSDP_C_TRANSPORT_CAPABILITIES_H
#define FSDP_C_TRANSPORT_CAPABILITIES_H

#include <stdbool.h>

/* Whether the environment sets a size of torch's flight recorder. The recorder that torch enables
 * by default does not count. */
bool fct_requests_flight_recorder(void);
/* Whether this rank accepts shared memory. The user can veto shared memory. A debug level and a
 * requested flight recorder also veto it, because they observe gloo's own collectives. */
bool fct_accepts_shared_memory(void);
/* CPUs in the affinity mask of the calling thread, or 1 if the mask is unknown. */
int fct_available_cpus(void);

#endif
