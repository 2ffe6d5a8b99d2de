/* The unsharded parameters of a group: their memory between copy-out and free, and the parameter
 * objects over it. Owns nothing; what is gathered into that memory, and when, is the gather's
 * business. All memory is given and freed on the device's current stream. */
#ifndef FSDP_C_CORE_UNSHARDED_H
#define FSDP_C_CORE_UNSHARDED_H

#include "chunks.h"
#include "members.h"
#include "plan.h"

/* One rank: the unsharded parameters may be the shards. All of them, or none (*all is false): an
 * alias that is made and given up again would cost the parameter the leaf that autograd knows. */
FC_CHECK fc_status fc_unsharded_alias(fc_members *m, bool *all);
/* Memory for the outputs, and for the inner tensors of extended parameters. A parameter that owns a
 * chunk takes the gathered chunk's memory; the others get fresh memory. After a failure some
 * parameters hold memory. */
FC_CHECK fc_status fc_unsharded_alloc(fc_members *m, const fc_gather_plan *plan,
                                      const fc_chunks *chunks);
/* Gives owned chunks their memory back, with its contents, so that it can be taken once more. */
void fc_unsharded_return(fc_members *m, const fc_gather_plan *plan, const fc_chunks *chunks);
/* The parameter objects over the outputs, which require grad as the shards do. `extends`: the hooks
 * of extended parameters have not run yet. */
FC_CHECK fc_status fc_unsharded_make(fc_members *m, bool extends);
/* Likewise over what somebody else has gathered. FC_ESTATE where a parameter holds no memory. */
FC_CHECK fc_status fc_unsharded_adopt(fc_members *m);
/* Before they are freed, while they can still be kept: FC_ESTATE, in torch's words, where one's
 * memory cannot be freed. */
FC_CHECK fc_status fc_unsharded_can_free(const fc_members *m);
void fc_unsharded_free(fc_members *m);
/* Before they are taken away: whoever has frozen or unfrozen them meant the parameters, and finds
 * them so from now on. */
FC_CHECK fc_status fc_unsharded_note_requirements(fc_members *m);

/* Whether memory is there where there `is` to be some, and only then; FC_ESTATE with a message
 * where not. `kept`: it may be there in any case. */
FC_CHECK fc_status fc_unsharded_check(const fc_members *m, bool is, bool kept);

#endif
