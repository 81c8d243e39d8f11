package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/envoy"
)

// leavesNothing fails the test if f leaves a goroutine or a file.
func leavesNothing(t *testing.T, f func()) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	before := runtime.NumGoroutine()
	f()
	for range 300 { // connections end in their own time
		if runtime.NumGoroutine() <= before {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > before {
		stacks := make([]byte, 1<<20)
		t.Errorf("%d goroutines are left:\n%s", n-before, stacks[:runtime.Stack(stacks, true)])
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, error %v", left, err)
	}
}

// TestStory tells the whole story, shortened.
func TestStory(t *testing.T) {
	for _, c := range []struct {
		gateway, mode string
		event         string
	}{
		{"in-process", "full-duplex", "always"},
		{"in-process", "trailers", "never"},
		{"envoy", "full-duplex", "always"},
		{"envoy", "streamed", "if the picker owes a reply"},
		{"envoy", "trailers", "never"},
	} {
		t.Run(c.gateway+"/"+c.mode, func(t *testing.T) {
			leavesNothing(t, func() {
				var out, errs bytes.Buffer
				if code := run(t.Context(), []string{"-gateway", c.gateway, "-mode", c.mode, "-requests", "3", "-tokens", "150"}, &out, &errs); code != 0 {
					t.Fatalf("exit code %d: %s%s", code, &out, &errs)
				}
				for _, want := range []string{
					`gateway +(Envoy|in process)`,
					`picker +has no room for urgent yet:\n +for a request of priority 1 that has waited \S+:\n +evict nobody, evictions are off\n`,
					`picker +evicts batch-3:\n +for a request of priority 1 that has waited \S+:\n +evict 1 on 127.0.0.1:\d+, whose place in the batch it needs.*:\n +priority -1, \d+ tokens, `,
					`batch-3 +gets (an error event|a reset, after status 200)`,
					`engine +ends it \(abort\)`,
					`batch: complete +3 of 3 +2 of 3\n`,
				} {
					if !regexp.MustCompile(want).Match(out.Bytes()) {
						t.Errorf("the output has no %q:\n%s", want, &out)
					}
				}
				if got := strings.Contains(out.String(), "error event, request_evicted"); got && c.event == "never" || !got && c.event == "always" {
					t.Errorf("the client got an error event: %v, want %s:\n%s", got, c.event, &out)
				}
			})
		})
	}
}

func TestInterrupt(t *testing.T) {
	for _, gateway := range []string{"in-process", "envoy"} {
		t.Run(gateway, func(t *testing.T) {
			leavesNothing(t, func() {
				ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
				defer cancel()
				var out, errs bytes.Buffer
				code := run(ctx, []string{"-gateway", gateway}, &out, &errs)
				if d := cmp.Diff("1 interrupted\n", fmt.Sprint(code, " ", &errs)); d != "" {
					t.Errorf("exit code and error (-want +got):\n%s%s", d, &out)
				}
			})
		})
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args, says string
		code       int
	}{
		{"-h", "-mode", 0},
		{"-requests 1", "-requests", 2},
		{"-tokens 10", "-tokens", 2},
		{"-mode buffered", `"buffered"`, 2},
		{"-gateway nginx", `"nginx"`, 2},
		{"-requests 2 -gateway in-process -admin :0", "not loopback", 1},
		{"now", `"now"`, 2},
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), strings.Fields(c.args), &out, &errs); code != c.code || !strings.Contains(errs.String(), c.says) {
			t.Errorf("%s: exit code %d, %q; want %d and something of %s", c.args, code, &errs, c.code, c.says)
		}
	}
}

// headers are those of a request with so many bytes.
func headers(authorization, bytes string) *extprocpb.HttpHeaders {
	return &extprocpb.HttpHeaders{Headers: &corepb.HeaderMap{Headers: []*corepb.HeaderValue{
		{Key: "x-request-id", RawValue: []byte("id")},
		{Key: "authorization", RawValue: []byte(authorization)},
		{Key: "content-length", RawValue: []byte(bytes)},
		{Key: envoy.EndpointHeader, RawValue: []byte("10.0.0.1:22")}, // for ourselves to decide
	}}}
}

// TestPick checks whom the picker believes.
func TestPick(t *testing.T) {
	const endpoint = "127.0.0.1:1"
	p := &picker{priorities: map[string]int{"a": -1, "b": 1}}
	p.newPool(flowcontrol.Endpoint{Name: endpoint, Capacity: 10_000})
	for _, c := range []struct {
		authorization, bytes string
		priority             int
		tokens               int64
	}{
		{"Bearer a", "403", -1, 100},
		{"Bearer b", "0", 1, 0},
		{"Bearer c", "", math.MinInt, 0},
		{"", "a few", math.MinInt, 0},
	} {
		own, ctx := abort.New(t.Context())
		defer own.Close()
		resp, err := p.pick(ctx, headers(c.authorization, c.bytes))
		if err != nil {
			t.Fatalf("%q: %v", c.authorization, err)
		}
		want := []abort.Request{{ID: "id", Priority: c.priority, Tokens: c.tokens, Endpoint: endpoint}}
		if d := cmp.Diff(want, own.Handle().Requests()); d != "" {
			t.Errorf("%q: request (-want +got):\n%s", c.authorization, d)
		}
		h := resp.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders()[0]
		if h.Header.Key != envoy.EndpointHeader || string(h.Header.RawValue) != endpoint || h.AppendAction != corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD {
			t.Errorf("%q: header %v, want %s overwritten with %s", c.authorization, h, envoy.EndpointHeader, endpoint)
		}
	}
}

// TestRefuse has the picker refuse requests, with one that runs and one that waits.
func TestRefuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &picker{priorities: map[string]int{"a": -1, "b": 1}}
		p.newPool(flowcontrol.Endpoint{Name: "127.0.0.1:1", Capacity: 1000, Slots: 1}, flowcontrol.WithMaxWaiting(1))
		ctx, cancel := context.WithCancelCause(t.Context())
		left := errors.New("the client left")
		if _, err := p.pick(ctx, headers("Bearer b", "400")); err != nil {
			t.Fatal(err)
		}
		waits := make(chan error, 1)
		go func() {
			_, err := p.pick(ctx, headers("Bearer b", "400"))
			waits <- err
		}()
		synctest.Wait()

		for _, c := range []struct {
			name, authorization, bytes string
			want                       string
		}{
			{"too large", "Bearer b", "8000", `413 ""`},
			{"overloaded", "Bearer a", "400", `429 "[1-9][0-9]?"`},
		} {
			resp, err := p.pick(ctx, headers(c.authorization, c.bytes))
			answer := resp.GetImmediateResponse()
			after := ""
			for _, h := range answer.GetHeaders().GetSetHeaders() {
				if h.Header.Key == "retry-after" {
					after = string(h.Header.RawValue)
				}
			}
			got := fmt.Sprintf("%d %q", answer.GetStatus().GetCode(), after)
			if err != nil || !regexp.MustCompile("^"+c.want+"$").MatchString(got) {
				t.Errorf("%s: status and Retry-After %s, error %v; want %s", c.name, got, err, c.want)
			}
		}
		cancel(left)
		if err := <-waits; err != left {
			t.Errorf("the one that waited: error %v, want %v", err, left)
		}
	})
}

// TestTooLarge has a gateway answer a request that no endpoint can take.
func TestTooLarge(t *testing.T) {
	for _, gateway := range []string{"in-process", "envoy"} {
		for _, m := range modes {
			t.Run(gateway+"/"+m.name, func(t *testing.T) {
				p := &picker{}
				p.newPool(flowcontrol.Endpoint{Name: "127.0.0.1:1", Capacity: 1000})
				g, err := startGateway(t.Context(), gateway, m, p.newServer())
				if err != nil {
					t.Fatal(err)
				}
				defer g.close()
				transport := &http.Transport{Protocols: newProtocols()}
				defer transport.CloseIdleConnections()
				r := &request{name: "large", prompt: 2000, max: 1}
				if err := r.stream(t.Context(), &http.Client{Transport: transport}, g.url, func() {}); err != nil || r.status != http.StatusRequestEntityTooLarge {
					t.Errorf("status %d, error %v; want %d", r.status, err, http.StatusRequestEntityTooLarge)
				}
			})
		}
	}
}

// acts returns two acts of two batch requests each in which all is as it should be:
// batch-2 is evicted in the second one.
func acts() (s *story, without, with *act) {
	s = &story{options: options{requests: 2, tokens: 100}, engine: &engineServer{blocks: 300}}
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	playAct := func(ttft int) *act {
		a := s.newAct()
		a.sent = len(a.requests)
		a.full = sample{at: at(100), running: 2, kv: 0.7}
		a.samples = []sample{a.full}
		for _, r := range a.requests {
			r.received.Store(int64(r.max))
			r.status, r.finish, r.done = 200, "length", true
			r.sent, r.first, r.end = at(100), at(100+ttft), at(900)
			a.clients[r.name] = r
			a.engines[r.name] = engine.End{ID: r.name, Reason: "length", At: at(900)}
			own, _ := abort.New(context.Background())
			own.Handle().Describe(abort.Request{ID: r.name, Priority: batchPriority})
			a.streams[r.name] = extproc.Event{Handle: own.Handle(), Outcome: abort.Completed, Settled: at(900)}
		}
		return a
	}
	without, with = playAct(500), playAct(20)

	v := with.clients["batch-2"]
	v.received.Store(50)
	v.finish, v.done, v.err, v.event = "", false, errors.New("reset"), apiError{Code: "request_evicted"}
	with.engines["batch-2"] = engine.End{ID: "batch-2", Reason: "abort", PromptTokens: batchPrompt, Tokens: 50, Canceled: at(101), At: at(105)}
	e := with.streams["batch-2"]
	e.Outcome, e.Answer, e.Settled = abort.Aborted, extproc.AnswerEvent, at(100)
	with.streams["batch-2"] = e
	with.samples = append(with.samples, sample{at: at(102), running: 2, kv: 0.71}, sample{at: at(106), running: 2, kv: 0.4}, sample{at: at(400), running: 2, kv: 0.5})
	return s, without, with
}

// TestCheck breaks one thing after the other.
func TestCheck(t *testing.T) {
	for _, c := range []struct {
		want  string
		wreck func(without, with *act)
	}{
		{"", func(_, _ *act) {}},
		{"without eviction: 1 requests were evicted", func(a, b *act) { a.streams["batch-2"] = b.streams["batch-2"] }},
		{"without eviction: only 1 of 2", func(a, _ *act) { a.clients["batch-1"].err = errors.New("reset") }},
		{"with eviction: 0 of 2", func(_, b *act) { b.clients["batch-1"].received.Store(99) }},
		{"with eviction: 0 of 2", func(_, b *act) { b.clients["batch-1"].done = false }},
		{"with eviction: 0 of 2", func(_, b *act) { b.clients["batch-1"].event = apiError{Code: "x"} }},
		{"0 requests were evicted, want 1", func(_, b *act) { delete(b.streams, "batch-2") }},
		{"2 requests were evicted, want 1", func(_, b *act) { b.streams["batch-1"] = b.streams["batch-2"] }},
		{"whose priority is 1", func(_, b *act) {
			b.streams["batch-2"].Handle.Describe(abort.Request{ID: "batch-2", Priority: urgentPriority})
		}},
		{"stream was not cut", func(_, b *act) { b.clients["batch-2"].err = nil }},
		{"didn't get the error event", func(_, b *act) { b.clients["batch-2"].event = apiError{} }},
		{"the engine did not abort it", func(_, b *act) { b.engines["batch-2"] = engine.End{Reason: "length", At: time.Now()} }},
		{"the engine did not abort it", func(_, b *act) { b.engines["batch-2"] = engine.End{Reason: "abort", At: time.Now()} }},
		{"never showed its KV blocks free", func(_, b *act) { b.samples = b.samples[:2] }},
		{"the engine was not full", func(_, b *act) { b.full.running = 1 }},
		{"preempted 1 requests by itself", func(_, b *act) { b.samples[len(b.samples)-1].preemptions = 1 }},
		{"the urgent request is not complete", func(_, b *act) { b.urgent().finish = "" }},
		{"first token took 500ms with eviction and 500ms without", func(a, b *act) { b.urgent().first = b.urgent().sent.Add(a.ttft()) }},
	} {
		s, without, with := acts()
		c.wreck(without, with)
		got := strings.Join(s.check(without, with), "\n")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("check found %q, want %q", got, c.want)
		}
	}
}
