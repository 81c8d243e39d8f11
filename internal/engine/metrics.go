package engine

import (
	"bytes"
	"fmt"
	"net/http"
)

// serveMetrics writes Prometheus' text format with the names, labels and units of vLLM (vllm/v1/metrics/loggers.py).
func (s *Server) serveMetrics(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	t := s.core.Stats()
	stop, length := s.ends["stop"], s.ends["length"]
	s.mu.Unlock()

	var b bytes.Buffer
	labels := fmt.Sprintf("engine=\"0\",model_name=%q", s.cfg.Model)
	head := func(name, kind, help string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind) }
	metric := func(name, kind, help string, v float64) {
		head(name, kind, help)
		fmt.Fprintf(&b, "%s{%s} %v\n", name, labels, v)
	}
	metric("vllm:num_requests_running", "gauge", "Number of requests in the batch.", float64(t.Running))
	metric("vllm:num_requests_waiting", "gauge", "Number of requests in the queue.", float64(t.Waiting))
	metric("vllm:kv_cache_usage_perc", "gauge", "Used part of the KV cache, 1 is all.", t.KVUsage())
	metric("vllm:num_preemptions_total", "counter", "Preemptions by the engine itself.", float64(t.Preemptions))
	metric("vllm:prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token.", float64(t.PromptTokens))
	metric("vllm:generation_tokens_total", "counter", "Tokens generated.", float64(t.GenerationTokens))

	const success = "vllm:request_success_total"
	head(success, "counter", "Requests that ended by themselves; aborted ones are not counted.")
	for _, e := range []struct {
		reason string
		n      int64
	}{{"stop", stop}, {"length", length}, {"abort", 0}} {
		fmt.Fprintf(&b, "%s{%s,finished_reason=%q} %d\n", success, labels, e.reason, e.n)
	}
	head("vllm:cache_config_info", "gauge", "Size of the KV cache.")
	fmt.Fprintf(&b, "vllm:cache_config_info{engine=\"0\",block_size=\"%d\",num_gpu_blocks=\"%d\"} 1\n", t.BlockSize, t.BlocksTotal)

	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.Write(b.Bytes())
}
