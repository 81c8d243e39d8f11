package main

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParseMetrics(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		name, text string
		want       sample
	}{
		{"vLLM", `# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting_by_reason{reason="capacity"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:request_success_total{finished_reason="stop"} 4
vllm:request_success_total{finished_reason="length"} 1e1
vllm:generation_tokens_total 12345
vllm:num_preemptions_total{} 2 1700000000000
`, sample{running: 3, waiting: 1, kv: 0.25, finished: 14, generated: 12345, preemptions: 2}},
		{"two ranks", `vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.4
`, sample{running: 7, waiting: nan, kv: 0.3, finished: nan, generated: nan, preemptions: nan}},
		{"an older vLLM", "vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5", sample{running: 1, waiting: nan, kv: 0.5, finished: nan, generated: nan, preemptions: nan}},
		{"SGLang", "sglang:num_running_reqs{model_name=\"m\"} 2\nsglang:num_queue_reqs 0\nsglang:token_usage 0.28\nsglang:generation_tokens_total 7.5e+06\n",
			sample{running: 2, waiting: 0, kv: 0.28, finished: nan, generated: 7.5e6, preemptions: nan}},
		{"llama.cpp", "llamacpp:requests_processing 8\nllamacpp:requests_deferred 2\n", sample{running: 8, waiting: 2, kv: nan, finished: nan, generated: nan, preemptions: nan}},
		{"odd lines", "\n{\n}\n \nvllm:num_requests_running\nvllm:num_requests_running{\nvllm:num_requests_running{a=\"} 9\n" +
			"vllm:num_requests_running{a=\"x \\\" } 8\",b=\"} 7\"} 5 # {trace=\"1\"} 6\r\nvllm:num_requests_running NaN\nvllm:num_requests_running +Inf\nvllm:num_requests_running five\n  vllm:num_requests_waiting\t6\n\xff\x00",
			sample{running: 5, waiting: 6, kv: nan, finished: nan, generated: nan, preemptions: nan}},
	} {
		got, err := parseMetrics(strings.NewReader(c.text), defaultNames())
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if d := cmp.Diff(c.want, got, cmp.AllowUnexported(sample{}), cmpopts.EquateNaNs(), cmpopts.EquateApprox(0, 1e-9), cmpopts.IgnoreTypes(time.Time{})); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
	for _, text := range []string{"", "up 1\n", "vllm:num_requests_running NaN\n", strings.Repeat("x", 2<<20)} {
		if m, err := parseMetrics(strings.NewReader(text), defaultNames()); err == nil {
			t.Errorf("%.30q: no error, %v", text, m)
		}
	}
}

func FuzzParseLine(f *testing.F) {
	for _, line := range []string{"a 1", `a{b="c"} 1 2`, `a{b="\"} 1`, "# a 1", "{", "a{", "a\t1"} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		name, value, ok := parseLine(line)
		if ok && (name == "" || strings.ContainsAny(name, "{ \t") || math.IsNaN(value) || math.IsInf(value, 0)) {
			t.Errorf("%q: %q %v", line, name, value)
		}
	})
}
