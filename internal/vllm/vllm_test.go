//go:build vllm

package vllm_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
	"github.com/extevict/extevict/internal/vllm"
)

const (
	rounds   = 20
	patience = 30 * time.Second // only a hang takes it
)

// capacity is eight requests, or five times a thousand tokens less what the fifth needs.
var capacity = vllm.Config{Blocks: 150, MaxSeqs: 8, StepTokens: 1024}

// A scene fills the engine with requests. One more waits, until one of them is evicted.
type scene struct {
	name    string
	running int // requests that fill it
	prompt  int // theirs, in tokens
	waiting int // the prompt of the one that waits
}

var scenes = []scene{
	{"batch-limited: 8 of 8 requests run", 8, 256, 256},
	{"KV-limited: 4 of 8 requests run, the next one's prompt has no room", 4, 960, 1000},
}

// The priorities of those that run: what is evicted for the one that waits, what is
// evicted then while nobody waits, and what stays.
const first, second, stays = -2, -1, 0

// TestEviction evicts from a real engine through a real Envoy, and prints how long it
// takes until the capacity is used again.
func TestEviction(t *testing.T) {
	python, err := vllm.Find()
	if err != nil {
		t.Fatal(err)
	}
	bin, err := envoy.Find()
	if err != nil {
		t.Fatal(err)
	}
	e, err := vllm.Start(t.Context(), python, capacity)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	g := newGateway(t, bin, e)
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) { g.play(t, s) })
	}
}

// play has the scene's rounds and judges them. A busy machine stops everything for a
// while, so what is judged is the median, and of the time that the other streams did
// not stand still.
func (g *gateway) play(t *testing.T, s scene) {
	idle := make([]time.Duration, rounds)
	for i := range idle {
		c := g.start(t, stays, s.waiting)
		c.awaitFirst(t)
		idle[i] = c.first().Sub(c.sent)
		g.leave(t, c)
	}
	before := g.metrics(t)
	var rs []round
	for range rounds {
		rs = append(rs, g.round(t, s))
	}
	if after := g.metrics(t); after.preemptions != before.preemptions {
		t.Errorf("the engine itself preempted %v requests: the scene does not fit it", after.preemptions-before.preemptions)
	}

	row := func(what string, ds []time.Duration) time.Duration {
		p50 := median(ds)
		fmt.Printf("  %-46s p50 %7.1f   max %7.1f ms\n", what, ms(p50), ms(slices.Max(ds)))
		return p50
	}
	column := func(f func(round) time.Duration) (ds []time.Duration) {
		for _, r := range rs {
			ds = append(ds, f(r))
		}
		return ds
	}
	fmt.Printf("%s (n=%d)\n", s.name, rounds)
	row("idle: first token of the waiting prompt", idle)
	step := row("between two tokens of a stream, before", column(func(r round) time.Duration { return r.step }))
	row("decision -> ext_proc stream's end", column(func(r round) time.Duration { return r.done }))
	row("decision -> first token of the waiting request", column(func(r round) time.Duration { return r.waited }))
	row("  longest gap of the other streams meanwhile", column(func(r round) time.Duration { return r.gap }))
	excess := row("  what is left without that gap", column(func(r round) time.Duration { return r.waited - r.gap }))
	row("decision -> running and KV gauges fall", column(func(r round) time.Duration { return r.freed }))
	scrapes := column(func(r round) time.Duration { return time.Duration(r.scrapes) })
	fmt.Printf("  %-46s p50 %7d   max %7d\n", "  in how many scrapes", median(scrapes), slices.Max(scrapes))

	if limit := max(10*step, 250*time.Millisecond); excess > limit {
		t.Errorf("the waiting request's first token took %v longer than the others stood still, want %v at most", excess, limit)
	}
	if n := median(scrapes); n > 5 {
		t.Errorf("the gauges fell after %d scrapes, want 5 at most", n)
	}
}

// A round is what was seen of two evictions.
type round struct {
	step   time.Duration // of the engine: the median time between tokens before
	done   time.Duration // from the decision until the ext_proc stream had ended
	waited time.Duration // from the decision to the waiting request's first token
	gap    time.Duration // the longest between two tokens of the others meanwhile

	freed   time.Duration // from the second decision until the gauges had fallen
	scrapes int           // in how many looks at them
}

// round fills the engine, has one more request wait, evicts one for it, then evicts
// another, for nobody, to see the gauges fall, and empties the engine.
func (g *gateway) round(t *testing.T, s scene) (r round) {
	t.Helper()
	priorities := append([]int{first, second}, make([]int, s.running-2)...)
	var calls []*call
	for _, p := range priorities {
		calls = append(calls, g.start(t, p, s.prompt))
	}
	for _, c := range calls {
		c.awaitFirst(t)
	}
	urgent := g.start(t, 1, s.waiting)
	g.await(t, "a request that waits", func(m metrics) bool { return m.running == float64(s.running) && m.waiting == 1 })
	time.Sleep(50 * time.Millisecond) // would it be let in after all?
	if !urgent.first().IsZero() {
		t.Fatal("the engine is not full: the request does not wait")
	}

	victim, others := calls[0], calls[1:]
	decided := time.Now()
	h := g.evict(t, victim, second)
	r.done = time.Since(decided)
	urgent.awaitFirst(t)
	admitted := urgent.first()
	r.waited = admitted.Sub(decided)
	var steps []time.Duration
	for _, c := range others {
		ts := c.tokens()
		for i := 1; i < len(ts); i++ {
			gap := ts[i].Sub(ts[i-1])
			switch {
			case ts[i].Before(decided):
				steps = append(steps, gap)
			case ts[i-1].Before(admitted):
				r.gap = max(r.gap, gap)
			}
		}
	}
	r.step = median(steps)

	full := g.await(t, "the request that waited", func(m metrics) bool { return m.running == float64(s.running) && m.waiting == 0 })
	share := float64(s.prompt/vllm.BlockTokens) / float64(capacity.Blocks) // the victim's at least
	decided = time.Now()
	h2 := g.evict(t, calls[1], stays)
	freed := g.await(t, "the gauges to fall", func(m metrics) bool {
		r.scrapes++
		return m.running == full.running-1 && full.kv-m.kv > share/2 // the others grow meanwhile
	})
	r.freed = freed.at.Sub(decided)

	for _, h := range []*abort.Handle{h, h2} {
		if h.Outcome() != abort.Aborted {
			t.Errorf("a victim's outcome is %v", h.Outcome())
		}
	}
	rest := append(slices.Clone(calls[2:]), urgent)
	for _, c := range rest {
		if c.isOver() {
			t.Errorf("a stream of priority %d has ended: %v", c.priority, c.err)
		}
	}
	for _, c := range calls[:2] {
		if c.awaitEnd(t); c.err == nil {
			t.Error("a victim's client saw no reset")
		}
	}
	g.leave(t, rest...)
	return r
}

// A gateway is an Envoy before an engine, whose ext_proc server has an evictor know its
// requests.
type gateway struct {
	engine *vllm.Engine
	ev     *evictor.Evictor
	url    string
	client *http.Client
}

// priorityHeader is the request header with the priority.
const priorityHeader = "x-priority"

func newGateway(t *testing.T, bin string, e *vllm.Engine) *gateway {
	t.Helper()
	g := &gateway{engine: e, ev: evictor.New(), client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(gs, extproc.Wrap(picker{ev: g.ev}))
	var wg sync.WaitGroup
	wg.Go(func() { gs.Serve(l) })
	t.Cleanup(func() {
		gs.Stop()
		wg.Wait()
	})
	proxy, err := envoy.Start(t.Context(), bin, envoy.Config{
		ExtProc:      []envoy.ExtProc{{Address: l.Addr().String(), Mode: envoy.ProcessingMode{ResponseTrailers: envoy.Send}}},
		Upstream:     envoy.Upstream{Endpoints: []string{e.Address()}},
		DelayedClose: new(100 * time.Millisecond),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Close(); err != nil {
			t.Error(err)
		}
	})
	g.url = proxy.URL()
	return g
}

// picker is the ext_proc server. It lets everything pass.
type picker struct {
	extprocpb.UnimplementedExternalProcessorServer
	ev *evictor.Evictor
}

func (p picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		req, err := st.Recv()
		if err != nil {
			return err
		}
		resp := &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}}
		switch r := req.Request.(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			var track abort.Request
			for _, h := range r.RequestHeaders.GetHeaders().GetHeaders() {
				switch h.GetKey() {
				case priorityHeader:
					if track.Priority, err = strconv.Atoi(string(h.GetRawValue())); err != nil {
						return err
					}
				case "x-request-id":
					track.ID = string(h.GetRawValue())
				}
			}
			p.ev.TrackRequests(st.Context(), track)
			resp.Response = &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{}}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}

// evict has c evicted, the only one below a priority, and waits until its ext_proc
// stream has ended.
func (g *gateway) evict(t *testing.T, c *call, below int) *abort.Handle {
	t.Helper()
	hs, err := g.ev.Evict(t.Context(), evictor.Demand{N: 1, Below: below, Reason: abort.Preempted})
	if err != nil || len(hs) != 1 {
		t.Fatalf("evicted %d, %v", len(hs), err)
	}
	if rs := hs[0].Requests(); len(rs) != 1 || rs[0].ID != c.id {
		t.Fatalf("evicted %+v, want %s", rs, c.id)
	}
	select {
	case <-hs[0].Done():
	case <-time.After(patience):
		t.Fatal("in vain: the end of the victim's ext_proc stream")
	}
	return hs[0]
}

// leave hangs up the calls and waits until the engine is empty.
func (g *gateway) leave(t *testing.T, calls ...*call) {
	t.Helper()
	for _, c := range calls {
		c.stop()
	}
	g.await(t, "the engine to be empty", func(m metrics) bool { return m.running+m.waiting == 0 && m.kv == 0 })
}

// metrics are some of the engine's.
type metrics struct {
	at               time.Time // when they were here
	running, waiting float64   // requests
	kv               float64   // used part of the KV cache, 0 to 1
	preemptions      float64   // by the engine itself, so far
}

var linePattern = regexp.MustCompile(`(?m)^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)\{[^}]*\} (\S+)$`)

func (g *gateway) metrics(t *testing.T) metrics {
	t.Helper()
	text, err := g.engine.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, m := range linePattern.FindAllStringSubmatch(text, -1) {
		if values[m[1]], err = strconv.ParseFloat(m[2], 64); err != nil {
			t.Fatal(err)
		}
	}
	value := func(name string) float64 {
		v, ok := values[name]
		if !ok || math.IsNaN(v) {
			t.Fatalf("the engine has no %s", name)
		}
		return v
	}
	return metrics{
		time.Now(), value("num_requests_running"), value("num_requests_waiting"),
		value("kv_cache_usage_perc"), value("num_preemptions_total"),
	}
}

// await looks at the metrics until they are as f wants them.
func (g *gateway) await(t *testing.T, what string, f func(metrics) bool) metrics {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		m := g.metrics(t)
		if f(m) {
			return m
		}
		if m.at.After(end) {
			t.Fatalf("in vain: %s: %+v", what, m)
		}
	}
}

// A call is a streamed completion that does not end by itself while a round lasts.
type call struct {
	id       string
	priority int
	sent     time.Time
	stop     context.CancelFunc
	started  chan struct{} // closed at the first token
	over     chan struct{} // closed at the end
	err      error         // how it was cut; set before over is closed

	mu  sync.Mutex
	ats []time.Time // of the tokens
}

// start sends a completion with a prompt of so many tokens. Its goroutine ends with the
// response, or the test.
func (g *gateway) start(t *testing.T, priority, prompt int) *call {
	t.Helper()
	// A prompt of its own, or it would share blocks. A byte is a token.
	var text strings.Builder
	for text.Len() < prompt {
		text.WriteString(rand.Text())
	}
	body, err := json.Marshal(map[string]any{
		"model": vllm.Model, "prompt": text.String()[:prompt], "stream": true, "max_tokens": 3000, "ignore_eos": true,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	c := &call{
		id: rand.Text(), priority: priority, sent: time.Now(), stop: cancel,
		started: make(chan struct{}), over: make(chan struct{}),
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", c.id)
	req.Header.Set(priorityHeader, strconv.Itoa(priority))
	go func() {
		defer close(c.over)
		defer cancel()
		c.err = c.do(g.client, req)
	}()
	return c
}

func (c *call) do(client *http.Client, req *http.Request) error {
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		// The headers come while the request waits; a token comes when it runs.
		if strings.HasPrefix(lines.Text(), "data: {") {
			c.mu.Lock()
			c.ats = append(c.ats, time.Now())
			if len(c.ats) == 1 {
				close(c.started)
			}
			c.mu.Unlock()
		}
	}
	return lines.Err()
}

func (c *call) tokens() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.ats)
}

// first returns when the first token came, zero before.
func (c *call) first() time.Time {
	if ts := c.tokens(); len(ts) > 0 {
		return ts[0]
	}
	return time.Time{}
}

func (c *call) isOver() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

func (c *call) awaitFirst(t *testing.T) {
	t.Helper()
	select {
	case <-c.started:
	case <-c.over:
		t.Fatalf("a stream ended: %v", c.err)
	case <-time.After(patience):
		t.Fatal("in vain: a first token")
	}
}

func (c *call) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-c.over:
	case <-time.After(patience):
		t.Fatal("in vain: a stream's end")
	}
}

func median(ds []time.Duration) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(ds))[len(ds)/2]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
