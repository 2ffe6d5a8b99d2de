"""Functions of torch's FSDP2 whose replacement fsdp_c does not call, or calls less often.

``test_patch_sweep.py`` checks both tables; csrc/README.md refers to them. All other targets of the
sweep are called by fsdp_c at least as often as by torch. "Fallback" collectives are those that
torch's functions run; these call the same functions as in torch.
"""

from __future__ import annotations

_STATE = "the core keeps the sharded state in C; patch unshard, reshard or _to_sharded"
_TRANSITION = "the core runs this part of a transition in C; patch the method that calls it"
_STREAMS = "the core orders streams in C; fallback all-gathers call get_all_gather_streams"
_GROUP = "only fallback collectives read it; the core has the process group from mesh_info"
_SHARDING = "the constructor of fsdp_c computes the shard; patch FSDPParam._init_sharded_param"
_MEMORY = (
    "the core changes storages in C; patch FSDPParam.alloc_all_gather_outputs or "
    "free_unsharded_param"
)
_REGISTRATION = "the core registers parameters in C; patch FSDPParam."
_CAST = "the core casts in C; patch "
_CLASS = "the object is of a class of fsdp_c, which has its own constructor"
_PREFETCH = "the core starts the all-gather; patch FSDPParamGroup.unshard or _backward_prefetch"
_CALLER = "fsdp_c has its own fully_shard, which calls the functions that this one calls"

NOT_CALLED = {
    "FSDPCommContext.get_all_gather_streams": _STREAMS,
    "FSDPParamGroup.__init__": _CLASS,
    "FSDPParamGroup._wait_all_gather_streams_on_event": _STREAMS,
    "FSDPParamGroup._record_post_forward": _TRANSITION,
    "FSDPParamGroup._wait_for_post_backward": _TRANSITION,
    "FSDPParamGroup._prefetch_unshard": _PREFETCH,
    "FSDPParamGroup._to_unsharded": _REGISTRATION + "to_unsharded",
    "FSDPParamGroup.is_sharded": _STATE,
    "FSDPParamGroup.is_sharded_post_forward": _STATE,
    "FSDPParamGroup.is_unsharded": _STATE,
    "FSDPParamGroup.use_training_state": _TRANSITION,
    "FSDPParamGroup._reshard_after_forward": "the core has the setting; set post_forward_mesh_info",
    "FSDPParamGroup._use_post_forward_mesh": "the core has the setting; set post_forward_mesh_info",
    "FSDPParamGroup._all_gather_process_group": _GROUP,
    "FSDPParamGroup._reduce_scatter_process_group": _GROUP,
    "FSDPParamGroup._with_fqn": "the core makes the names of profiler ranges in C",
    "FSDPParam.unsharded_param": "a property of fsdp_c; a warning names init_unsharded_param",
    "FSDPParam._sharded_local_tensor": "the core has the local tensor",
    "FSDPParam._assert_in_states": "the core checks the sharded state in C",
    "_fsdp_param.alloc_storage": _MEMORY,
    "_fsdp_param.free_storage": _MEMORY,
    "_fsdp_param.unsafe_setattr_param": _REGISTRATION + "_setattr_on_modules",
    "_fsdp_param.set_requires_grad_if_needed": _REGISTRATION + "to_unsharded",
    "FSDPStateContext.__init__": _CLASS,
    "FSDPState.__init__": _CLASS,
    "_fsdp_init._init_param_group": _CALLER,
    "_fsdp_init._get_modules_and_states": _CALLER,
    "_fsdp_common._get_dim0_padded_size": _SHARDING,
    "_fsdp_common._chunk_with_empty": _SHARDING,
    "_fsdp_common._get_dim_chunked_size": _SHARDING,
    "_fsdp_common._from_local_no_grad": _SHARDING,
    "_fsdp_common._to_dtype_if_needed": _CAST + "foreach_reduce or FSDPParam.all_gather_inputs",
    "_fsdp_common._cast_fp_tensor": _CAST + "FSDPState._cast_forward_inputs",
    "_fsdp_common.is_bw": "the core has the state of the backward in C",
}
"""Target -> reason, and the function to patch instead."""

CALLED_LESS_OFTEN = {
    "FSDPParam._setattr_on_modules": "construction registers the sharded parameter in C",
    "FSDPState._lazy_init": "only until it has run",
    "_fsdp_init._init_default_mesh": "the default mesh is kept",
}
"""Target -> reason."""
