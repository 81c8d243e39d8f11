package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// names are the engine's names for what the check reads: for each key some, the first
// that is there counts.
type names map[string][]string

// The defaults are those of vLLM, then SGLang and llama.cpp.
func defaultNames() names {
	return names{
		"running":     {"vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"},
		"waiting":     {"vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"},
		"kv":          {"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"},
		"finished":    {"vllm:request_success_total"},
		"generated":   {"vllm:generation_tokens_total", "sglang:generation_tokens_total"},
		"preemptions": {"vllm:num_preemptions_total"},
	}
}

// String implements flag.Value.
func (n names) String() string { return "" }

// Set implements flag.Value for key=name[,name].
func (n names) Set(text string) error {
	key, list, ok := strings.Cut(text, "=")
	if _, known := n[key]; !ok || !known || list == "" {
		return errors.New("want running=, waiting=, kv=, finished=, generated= or preemptions= and a metric's name")
	}
	n[key] = strings.Split(list, ",")
	return nil
}

// A sample is what the engine's metrics say. What they don't have is NaN.
type sample struct {
	at               time.Time // when it was here
	running, waiting float64   // requests
	kv               float64   // used part of the KV cache, 0 to 1
	finished         float64   // requests that ended by themselves, so far
	generated        float64   // tokens, so far
	preemptions      float64   // by the engine itself, so far
}

func (m sample) String() string {
	text := "running " + count(m.running) + ", waiting " + count(m.waiting)
	if !math.IsNaN(m.kv) {
		text += ", KV cache " + percent(m.kv)
	}
	return text
}

const maxMetrics = 16 << 20 // bytes

// readMetrics reads a sample from a URL.
func readMetrics(ctx context.Context, c *http.Client, url string, n names) (sample, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return sample{}, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return sample{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return sample{}, fmt.Errorf("%s: %s", url, resp.Status)
	}
	m, err := parseMetrics(io.LimitReader(resp.Body, maxMetrics), n)
	if err != nil {
		return sample{}, fmt.Errorf("%s: %w", url, err)
	}
	m.at = time.Now()
	return m, nil
}

// parseMetrics reads Prometheus' text format, or OpenMetrics'. An engine with several
// ranks has a line of each: they add up, and the usage of the KV cache is their mean.
// It skips what it doesn't understand.
func parseMetrics(r io.Reader, n names) (sample, error) {
	sums, lines := make(map[string]float64), make(map[string]float64)
	wanted := make(map[string]bool)
	for _, list := range n {
		for _, name := range list {
			wanted[name] = true
		}
	}
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		if name, value, ok := parseLine(scanner.Text()); ok && wanted[name] {
			sums[name] += value
			lines[name]++
		}
	}
	if err := scanner.Err(); err != nil {
		return sample{}, err
	}
	value := func(key string) float64 {
		i := slices.IndexFunc(n[key], func(name string) bool { return lines[name] > 0 })
		if i < 0 {
			return math.NaN()
		}
		name := n[key][i]
		if key == "kv" {
			return sums[name] / lines[name]
		}
		return sums[name]
	}
	m := sample{
		running: value("running"), waiting: value("waiting"), kv: value("kv"),
		finished: value("finished"), generated: value("generated"), preemptions: value("preemptions"),
	}
	if math.IsNaN(m.running) {
		return m, fmt.Errorf("no metric %s: name yours with -metric running=NAME", strings.Join(n["running"], " or "))
	}
	return m, nil
}

// parseLine reads a line such as
//
//	name{label="a \" } b"} 1.5 1700000000000
func parseLine(line string) (name string, value float64, ok bool) {
	line = strings.TrimSpace(line)
	end := strings.IndexAny(line, "{ \t")
	if end <= 0 || line[0] == '#' {
		return "", 0, false
	}
	name, rest := line[:end], line[end:]
	if rest[0] == '{' {
		quoted, closed := false, -1
		for i := 1; i < len(rest) && closed < 0; i++ {
			switch {
			case quoted && rest[i] == '\\':
				i++
			case rest[i] == '"':
				quoted = !quoted
			case !quoted && rest[i] == '}':
				closed = i
			}
		}
		if closed < 0 {
			return "", 0, false
		}
		rest = rest[closed+1:]
	}
	fields := strings.Fields(rest) // the value, and perhaps a timestamp or an exemplar
	if len(fields) == 0 {
		return "", 0, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	if err != nil || math.IsNaN(value) || math.IsInf(value, 0) {
		return "", 0, false
	}
	return name, value, true
}

// count writes a number of requests.
func count(f float64) string {
	if math.IsNaN(f) {
		return "?"
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

func percent(f float64) string { return fmt.Sprintf("%.1f%%", 100*f) }
