"""Functions of torch's FSDP2 whose replacement fsdp_c does not call, or calls less often.

``test_patch_sweep.py`` checks the tables, and docs/private-surface.md refers to them. fsdp_c calls
all other targets of the sweep at least as often as torch. In a fallback, torch's functions run the
collectives, and call the same functions as in torch.
"""

from __future__ import annotations

from releases import has

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
_BUFFERS = "the core owns the buffers of all-gathers"
_GRAD_DTYPE = "the core has the dtypes of gradients in C; patch FSDPParam.init_dtype_attrs"
_COPIES = "the core copies in C; patch foreach_all_gather_copy_out or foreach_reduce"
_CLASS = "the object is of a class of fsdp_c, which has its own constructor"
_PREFETCH = "the core starts the all-gather; patch FSDPParamGroup.unshard or _backward_prefetch"
_CALLER = "fsdp_c has its own fully_shard, which calls the functions that this one calls"

_END = "the core ends the iteration in C"

NOT_CALLED_UNTIL_2_12 = {
    "RegisterPostBackwardFunction._assert_not_tracing_fsdp": (
        "the autograd function of fsdp_c is in C; patch RegisterPostBackwardFunction.forward"
    ),
    "_fsdp_common.detect_compiled_autograd": "under compiled autograd the backward raises",
}
NOT_CALLED_UNTIL_2_13 = {
    "FSDPState._finalize_backward": _END + "; patch FSDPParamGroup.finalize_backward",
}
NOT_CALLED_UNTIL_2_15 = {"FSDPParamGroup._wait_all_gather_streams_on_event": _STREAMS}
NOT_CALLED_SINCE_2_14 = {
    "FSDPParam._restore_spmd_types": "fsdp_c calls it for parameters with types only",
}
NOT_CALLED_SINCE_2_15 = {
    "FSDPCommContext.wait_all_gather_streams_on_event": _STREAMS,
    "FSDPCommContext.release_all_gather_state_for_comm_reuse": _BUFFERS,
    "FSDPCommContext.release_all_gather_state_on_current_stream": _BUFFERS,
    "FSDPParamGroup._init_reduce_scatter_param_order": "the plan in C has the order",
    "FSDPParamGroup._get_partial_reduce_grad": _TRANSITION,
    "FSDPParamGroup._validate_unused_param_grad_dtypes": "the group of fsdp_c validates itself",
    "FSDPParamGroup._set_unsharded_grad_dtypes": _GRAD_DTYPE,
    "FSDPParamGroup._get_reduce_dtype": _GRAD_DTYPE,
    "FSDPParamGroup._take_unsharded_grads_to_reduce": _TRANSITION,
    "FSDPParamGroup._get_unsharded_grad_to_reduce": _TRANSITION,
    "FSDPParam._capture_grad_dtype_policy": "fsdp_c reads grad_dtype when it makes the shard",
    "FSDPParam._release_all_gather_outputs_if_needed": _MEMORY,
    "FSDPParam.free_all_gather_outputs": _MEMORY,
    "FSDPState._end_backward_iteration": _END,
    "FSDPState.wait_for_gradient_reduction": _END,
    "_fsdp_collectives._default_all_gather_output_fn": _COPIES,
    "_fsdp_collectives._default_reduce_scatter_input_fn": _COPIES,
    "_fsdp_param._get_dtensor_spec_with_dtype": "the specs of dtypes are cached",
}

NOT_CALLED = {
    "FSDPCommContext.get_all_gather_streams": _STREAMS,
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
    **({} if has("2.12") else NOT_CALLED_UNTIL_2_12),
    **({} if has("2.13") else NOT_CALLED_UNTIL_2_13),
    **(NOT_CALLED_SINCE_2_14 if has("2.14") else {}),
    **(NOT_CALLED_SINCE_2_15 if has("2.15") else NOT_CALLED_UNTIL_2_15),
}
"""Target -> reason, and the function to patch instead."""

CALLED_LESS_OFTEN = {
    "FSDPParam._setattr_on_modules": "construction registers the sharded parameter in C",
    "FSDPState._lazy_init": "only until it has run",
    "_fsdp_init._init_default_mesh": "the default mesh is kept",
}
"""Target -> reason."""
