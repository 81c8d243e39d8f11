package e2e_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/internal/engine"
)

// gauges returns what an engine's /metrics say of its load.
func gauges(t *testing.T, e http.Handler) (running, waiting int, kv float64) {
	t.Helper()
	rec := httptest.NewRecorder()
	e.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	gauge := func(name string) float64 {
		m := regexp.MustCompile(`(?m)^vllm:` + name + `\{[^}]*\} (\S+)$`).FindStringSubmatch(rec.Body.String())
		if m == nil {
			t.Fatalf("no %s in:\n%s", name, rec.Body)
		}
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	return int(gauge("num_requests_running")), int(gauge("num_requests_waiting")), gauge("kv_cache_usage_perc")
}

// completion returns a streamed completion of the given size in tokens.
func completion(p *path, priority, prompt, tokens int) *call {
	c := newCall(p, nil) // the engine serves it
	c.uri = "/v1/completions?" + strings.TrimPrefix(c.uri, "/")
	c.body = strings.NewReader(fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"stream":true}`, strings.Repeat("abc ", prompt), tokens))
	c.request = abort.Request{Priority: priority, Tokens: int64(prompt + tokens)}
	c.enough = 1 // the first token
	return c
}

// TestEngine is what all of this is for. Two requests fill an engine's batch, an
// urgent one waits; one of the two is evicted, its slot and its blocks come back, and
// the urgent one gets its first token.
func TestEngine(t *testing.T) {
	const slots, prompt = 2, 1600 // 100 blocks each
	for _, m := range []mode{none, duplex} {
		t.Run(m.String(), func(t *testing.T) {
			ends := make(chan engine.End, 16)
			e := engine.NewServer(engine.Config{
				Blocks: 400, MaxSeqs: slots, OnEnd: func(end engine.End) { ends <- end },
				Cost: engine.Cost{Step: 10 * time.Millisecond}, // slow enough to be looked at
			})
			t.Cleanup(e.Close)
			w := start(t, setup{mode: m, backend: e})
			for _, p := range w.paths {
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				batch := []*call{completion(p, -1, prompt, 1000), completion(p, -1, prompt, 1000)}
				for _, c := range batch {
					w.start(ctx, c)
					c.must(t, hasEnough)
				}
				urgent := completion(p, 1, 160, 20)
				w.start(t.Context(), urgent)
				urgent.must(t, tracked)
				if !eventually(func() bool { r, q, kv := gauges(t, e); return r == slots && q == 1 && kv > 0.5 }) {
					t.Fatalf("%s: the engine is not full: %+v", p.name, e.Stats())
				}
				if urgent.isSet(hasEnough) {
					t.Errorf("%s: the urgent request does not wait", p.name)
				}

				vs, err := w.ev.Evict(t.Context(), evictor.Demand{N: 1, Below: urgent.request.Priority, Reason: abort.Preempted})
				if err != nil || len(vs) != 1 || vs[0] != batch[1].handle { // the latest has lost least
					t.Fatalf("%s: evicted %v, %v", p.name, vs, err)
				}
				batch[1].must(t, done, observed)
				urgent.must(t, hasEnough)
				if end := <-ends; end.Reason != "abort" || end.Canceled.IsZero() {
					t.Errorf("%s: the engine says of the victim: %+v", p.name, end)
				}
				if r, q, kv := gauges(t, e); r > slots || q != 0 || kv > 0.45 {
					t.Errorf("%s: with the urgent request in: %d running, %d waiting, %.2f of the blocks used", p.name, r, q, kv)
				}
				if !p.reset(batch[1].reply.err) || strings.HasSuffix(batch[1].reply.body, errorEvent) != (m == duplex) {
					t.Errorf("%s: the victim's client got %q, %v", p.name, batch[1].reply.body, batch[1].reply.err)
				}

				urgent.must(t, done, observed)
				if r := urgent.reply; r.err != nil || r.status != http.StatusOK || !strings.HasSuffix(r.body, last) {
					t.Errorf("%s: the urgent request's client got %q, %v", p.name, r.body, r.err)
				}
				if batch[0].isSet(done) || batch[0].handle.Outcome() != abort.Pending {
					t.Errorf("%s: the other one is %v", p.name, batch[0].handle.Outcome())
				}
				leave()
				batch[0].must(t, observed)
				var reasons []string
				for range 2 {
					reasons = append(reasons, (<-ends).Reason)
				}
				if d := cmp.Diff([]string{"length", "abort"}, reasons); d != "" {
					t.Errorf("%s: ends of the urgent and the other one (-want +got):\n%s", p.name, d)
				}
				if r, q, kv := gauges(t, e); r+q != 0 || kv != 0 {
					t.Errorf("%s: in the end: %d running, %d waiting, %.2f of the blocks used", p.name, r, q, kv)
				}
			}
		})
	}
}
