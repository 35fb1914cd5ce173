"""All server arguments of SGLang: how each one enters the key space, or why KV does not depend on it.

A test compares these tables with the `ServerArgs` of the installed SGLang, so it finds the arguments
that a later SGLang adds. Until one is listed here, `LaunchIdentity` assumes that KV depends on it.
`make identity-page` writes the tables to docs/sglang-identity.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# These arguments enter `revision` as "name=value", unless they are None or have the value listed here.
BY_VALUE: Mapping[str, Any] = {
    "revision": None,
    "weight_version": "default",
    "quantization": None,
    "json_model_override_args": "{}",
    "dtype": "auto",
    "context_length": None,
    "model_impl": "auto",
    "model_config_parser": "auto",
    "model_loader_extra_config": "{}",
    "is_embedding": False,
    "modelopt_quant": None,
    "quantize_and_serve": False,
    "qsa_indexer_dtype": "auto",
    "prefill_kv_cache_dequant_dtype": "auto",
    "mamba_ssm_dtype": None,
    "enable_mamba_cache_stochastic_rounding": False,
    "mamba_cache_philox_rounds": 0,
    "enable_int8_mamba_checkpoint": False,
    "enable_page_major_kv_layout": False,
    "enable_unified_memory": False,
    "c128_page_size": 16,
    "enable_encoder_swa_bounded_replay": False,
    "enable_decoder_swa_bounded_replay": False,
    "enable_hisparse": False,
    "hisparse_config": None,
    "enable_dsa_cache_layer_split": False,
    "enable_prefill_cp": False,
    "cp_strategy": None,
    "enable_quant_communications": False,
    "enable_w4a4_mxfp4_megamoe": False,
    "flashinfer_mxfp4_moe_precision": "default",
    "deepep_dispatcher_output_dtype": "auto",
    "flashinfer_a2a_dispatch_type": None,
    "enforce_shared_experts_fusion": False,
    "enable_deepseek_v4_fp4_indexer": False,
    "kt_method": "AMXINT4",
    "kt_num_gpu_experts": None,
    "kt_max_deferred_experts_per_token": None,
    "dllm_algorithm": None,
    "rl_on_policy_target": None,
    "enable_mis": False,
    "experts_shared_outer_loras": None,
    "enable_precise_embedding_interpolation": False,
    "mm_process_config": {},
    "image_processor_backend": "auto",
    "disable_fast_image_processor": False,
    "trust_mm_content_hashes": False,
    "kv_canary": "none",
    "forward_hooks": None,
}

# These arguments enter only the `revision` of pools of a draft model.
DRAFT_BY_VALUE: Mapping[str, Any] = {
    "speculative_draft_model_revision": None,
    "speculative_draft_model_quantization": None,
    "speculative_algorithm": None,
    "speculative_draft_window_size": None,
    "speculative_draft_sink_size": None,
    "speculative_enable_w4a4_mxfp4_megamoe": None,
    "enable_multi_layer_eagle": False,
}

# KV depends on the bytes of these files. Their digest enters `revision`.
BY_DIGEST = (
    *("quantization_param_path", "decrypted_config_file", "rl_quant_profile"),
    *("dllm_algorithm_config", "debug_tensor_dump_input_file"),
)
DRAFT_BY_DIGEST = ("decrypted_draft_config_file",)

# A fingerprint of these weights enters `revision`.
BY_FINGERPRINT = ("kt_weight_path", "uno_lora_path", "modelopt_checkpoint_restore_path")

# These formats load different weights from the same files. Other formats differ only in speed.
OTHER_WEIGHTS = ("dummy", "bitsandbytes", "flash_rl")

_ELSEWHERE: Mapping[str, str] = {
    "model_path": "`revision`: a fingerprint of the weights",
    "download_dir": "`revision`: the fingerprint covers the files in this directory",
    "load_format": f"`revision`, if it is {', '.join(OTHER_WEIGHTS)}; others load the same weights",
    "served_model_name": "`model`",
    "kv_cache_dtype": "`dtype`; a type that it does not name (fp4) is refused",
    "page_size": "`page_tokens`",
    "hicache_mem_layout": "`layout`",
    "tp_size": "`shard.heads`, or none if ranks hold the same bytes; `layout` if a rank has one head",
    "attn_dp_size": "`shard.heads`: SGLang passes the attention's own rank and size",
    "enable_dp_attention": "`shard.heads`, as `attn_dp_size`",
    "pp_size": "`shard.layers`, and the stage in `layout`",
    "attn_cp_size": "`shard.context`",
    "disable_hybrid_swa_memory": "`pool`, `shard.layers` and `page_nbytes`",
    "attention_backend": "`page_nbytes`: backends that pack MLA differently have other page sizes",
    "prefill_attention_backend": "`page_nbytes`, as `attention_backend`",
    "decode_attention_backend": "`page_nbytes`, as `attention_backend`",
    "dsa_prefill_backend": "`page_nbytes`, as `attention_backend`",
    "dsa_decode_backend": "`page_nbytes`, as `attention_backend`",
    "dsv4_attn_backend": "`page_nbytes`, as `attention_backend`",
    "lora_paths": "the page hash (name, path), and `revision`: both, with a fingerprint of the weights",
    "speculative_draft_model_path": "`revision` of draft pools: the path, and a fingerprint",
    "speculative_draft_load_format": "`revision` of draft pools, as `load_format`",
    "speculative_draft_kv_cache_dtype": "`dtype` of draft pools",
    "hicache_storage_backend_extra_config": "`adapter.*`: `tenant`, `revision`, `weights`, `dtype`,"
    " `draft_model`; SGLang's `tp_lcm_size`: `shard.heads`",
}

_REFUSED: Mapping[str, str] = {
    "dcp_size": "above 1: ranks share the tokens of a page",
    "enable_kv_cache_sharding": "by SGLang, together with any storage",
}

# KV does not depend on these arguments. Each key is the reason.
INERT: Mapping[str, str] = {
    "The process, its devices and its clocks.": """
        device base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout
        soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold""",
    "Network, front end, tokenizer. Keys are made of token ids, from any source.": """
        enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path
        enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs
        grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups enable_http2
        http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
        ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key chat_template
        trust_request_chat_template hf_chat_template_name completion_template file_storage_path
        enable_cache_report return_input_ids return_output_ids reasoning_parser
        default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser
        tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions
        preferred_sampling_params allow_auto_truncate stream_interval batch_notify_size
        stream_response_default_include_usage incremental_streaming_output enable_streaming_session
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode""",
    "Logs, metrics, traces and dumps.": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers kv_canary_real_data kv_canary_sweep_interval
        debug_tensor_dump_output_folder debug_tensor_dump_layers msprobe_dump_config""",
    "Scheduling and memory. Batches of other sizes round differently, also within one server.": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
        swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
        prefill_only_disable_kv_cache disable_chunked_prefix_cache disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size
        mamba_full_memory_ratio enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay mamba_max_states_per_path
        mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval int8_mamba_ckpt_size
        linear_replayssm_cache_len pp_max_micro_batch_size pp_async_batch_depth dllm_fdfo""",
    "Selection and timing of pages in L1, L2 and the storage. Their content stays the same.": """
        radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config
        disable_radix_cache enable_session_radix_cache radix_cache_backend enable_hierarchical_cache
        hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction
        hicache_write_policy hicache_io_backend hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config
        enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file""",
    "Other kernels of the same function, on the same KV format. They round differently, as other"
    " hardware does.": """
        enable_fp32_lm_head enable_tf32_matmul enable_lean_attention enable_nvidia_megakernel
        enable_amd_monokernel fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        dsv4_prefill_backend dsa_triton_union dsa_paged_mqa_logits_backend dsa_topk_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged
        enable_fused_qk_norm_rope enable_dsa_fused_indexer mamba_backend linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_linear_replayssm enable_linear_replayssm_spec cuda_graph_config
        cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill cuda_graph_prefill_max_context disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_torch_compile
        enable_torch_compile_debug_mode torch_compile_max_bs enable_two_batch_overlap
        enable_single_batch_overlap tbo_token_distribution_threshold enable_deterministic_inference
        moe_runner_backend disable_shared_experts_fusion mm_attention_backend lora_backend
        max_lora_chunk_size lora_use_virtual_experts""",
    "Exchange of activations between ranks. Sums are the same, up to rounding.": """
        enable_layerwise_nvtx_marker enable_nccl_nvls enable_symm_mem disable_custom_all_reduce
        enable_mscclpp enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl boundary_reduction
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode nccl_port
        dist_timeout dist_init_addr gated_launch_port nnodes node_rank dp_size load_balance_method
        moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj enable_cp_tp_group_sharing
        enable_cp_decode_attn_tp enable_dp_attention_local_control_broadcast enable_dp_lm_head
        enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered enable_shared_experts_attn_tp
        shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp
        enable_megamoe_for_layernorm_sp disable_attn_tp_gather enable_p2p_check ep_size
        moe_dense_tp_size ep_join_rank_offset elastic_ep_initial_size max_ep_size
        enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode deepep_mode fuseep_mode
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
        elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device enable_waterfill
        ep_join_mode elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather""",
    "Location of weights while the server runs. The fingerprint covers their content.": """
        trust_remote_code modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode
        custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config model_checksum delete_ckpt_after_loading
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
        weight_cache_timeout enable_memory_saver enable_weights_cpu_backup
        enable_draft_weights_cpu_backup cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir
        enable_paged_experts paged_experts_num_resident kt_cpuinfer kt_threadpool_count""",
    "Loading and eviction of LoRA adapters.": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_strict_loading lora_drain_wait_threshold""",
    "Use of logits and hidden states, which are computed after KV.": """
        sampling_backend grammar_backend enable_custom_logit_processor enable_watermark
        watermark_config watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all enable_return_hidden_states return_hidden_states_mode
        enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
        enable_return_routed_experts enable_return_indexer_topk sampling_mask_max_tokens
        disable_outlines_disk_cache""",
    "Transport of images and sounds to the model. Their token ids are a hash of the prepared input.": """
        enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache
        mm_enable_dp_encoder mm_processor_worker_num mm_io_worker_num allowed_media_domains
        media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request
        enable_mm_global_cache mm_global_cache_backend mm_feature_transport encoder_only language_only
        language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port
        encoder_register_urls enable_adaptive_dispatch_to_encoder""",
    "Cooperation of prefill and decode servers. Both must have been started for the same model.": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role disaggregation_mode disaggregation_decode_allocation_policy
        disaggregation_transfer_backend disaggregation_enable_kv_checksum
        disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval enable_pd_role_switch
        optimistic_prefill_attempts enable_pdmux pdmux_config_path sm_group_num
        disaggregation_decode_host_receive_threshold""",
    "Number and acceptance of draft tokens. Only accepted tokens enter the cache.": """
        speculative_boundary_reduction speculative_num_steps speculative_eagle_topk
        speculative_num_draft_tokens speculative_dflash_block_size
        speculative_domino_candidate_pool_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_use_block_verification speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_moe_runner_backend speculative_moe_a2a_backend
        _speculative_draft_quantization_explicitly_set speculative_adaptive
        speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type
        speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_skip_dp_mlp_sync""",
}


def classified() -> Iterator[tuple[str, str, str]]:
    """Yield each argument's name, "enters", "refused" or "cannot", and where it enters or why not."""
    for name, neutral in BY_VALUE.items():
        yield name, "enters", f"`revision`, by its value, unless that is `{neutral}`"
    for name, neutral in DRAFT_BY_VALUE.items():
        yield name, "enters", f"`revision` of draft pools, by its value, unless that is `{neutral}`"
    for name in BY_DIGEST:
        yield name, "enters", "`revision`: a digest of the file"
    for name in DRAFT_BY_DIGEST:
        yield name, "enters", "`revision` of draft pools: a digest of the file"
    for name in BY_FINGERPRINT:
        yield name, "enters", "`revision`: a fingerprint of these weights"
    for name, where in _ELSEWHERE.items():
        yield name, "enters", where
    for name, why in _REFUSED.items():
        yield name, "refused", why
    for why, names in INERT.items():
        for name in names.split():
            yield name, "cannot", why


KNOWN = frozenset(name for name, _, _ in classified())
ENTERING = frozenset(name for name, how, _ in classified() if how == "enters")
# These must not change while a storage is attached. The storage's config is left out, because the
# attach itself sets it after it has opened the storage.
WATCHED = ENTERING - {"hicache_storage_backend_extra_config"}
