package engine_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/internal/engine"
)

// A pipeListener is a network in memory, so that HTTP works inside a bubble.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.IPAddr{} }

func (l *pipeListener) dial(context.Context, string, string) (net.Conn, error) {
	c, s := net.Pipe()
	l.conns <- s
	return c, nil
}

// An instance is an engine with its HTTP server and a client, all inside the bubble of one test.
type instance struct {
	t      *testing.T
	srv    *engine.Server
	pipes  *pipeListener
	client *http.Client

	mu   sync.Mutex
	ends []engine.End
}

// bubble runs f with an engine inside a synctest bubble.
func bubble(t *testing.T, c engine.Config, f func(*testing.T, *instance)) {
	synctest.Test(t, func(t *testing.T) {
		i := &instance{t: t, pipes: &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}}
		c.OnEnd = func(e engine.End) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.ends = append(i.ends, e)
		}
		i.srv = engine.NewServer(c)
		transport := &http.Transport{DialContext: i.pipes.dial}
		i.client = &http.Client{Transport: transport}
		hs := &http.Server{Handler: i.srv}
		var wg sync.WaitGroup
		wg.Go(func() { hs.Serve(i.pipes) })
		f(t, i)
		i.srv.Close()
		transport.CloseIdleConnections()
		hs.Close()
		wg.Wait()
	})
}

func (i *instance) end(n int) []engine.End {
	i.t.Helper()
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.ends) != n {
		i.t.Fatalf("%d ends, want %d: %+v", len(i.ends), n, i.ends)
	}
	return i.ends
}

// do sends a request and returns when its headers are here.
func (i *instance) do(ctx context.Context, path, id, body string) (*http.Response, error) {
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, strings.NewReader(body))
	if err != nil {
		i.t.Fatal(err)
	}
	if id != "" {
		r.Header.Set("X-Request-Id", id)
	}
	return i.client.Do(r)
}

func (i *instance) read(path, id, body string) (status int, answer string) {
	i.t.Helper()
	r, err := i.do(i.t.Context(), path, id, body)
	if err != nil {
		i.t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		i.t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// text is a prompt of n tokens.
func text(n int) string { return strings.Repeat("abc ", n) }

func body(prompt, tokens int, stream bool) string {
	return fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"stream":%t}`, text(prompt), tokens, stream)
}

// A chunk is what a client sees of a completion, whole or streamed.
type chunk struct {
	ID, Object, Model string
	Choices           []struct {
		Index          int
		Text           string
		Message, Delta struct{ Role, Content string }
		FinishReason   *string `json:"finish_reason"`
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Total      int `json:"total_tokens"`
	}
}

func decode(t *testing.T, s string) (c chunk) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &c); err != nil {
		t.Fatalf("%v in %q", err, s)
	}
	return c
}

// events splits an SSE body strictly: every event is one data line and an empty one, the last is [DONE].
func events(t *testing.T, s string) (chunks []chunk) {
	t.Helper()
	parts := strings.SplitAfter(s, "\n\n")
	n := len(parts) - 2
	if n < 0 || parts[n+1] != "" || parts[n] != "data: [DONE]\n\n" {
		t.Fatalf("no proper end: %q", s)
	}
	for _, p := range parts[:n] {
		data, ok := strings.CutPrefix(strings.TrimSuffix(p, "\n\n"), "data: ")
		if !ok || strings.Contains(data, "\n") {
			t.Fatalf("not an event: %q", p)
		}
		chunks = append(chunks, decode(t, data))
	}
	return chunks
}

func TestCompletions(t *testing.T) {
	bubble(t, engine.Config{Model: "m", AnswerTokens: 3}, func(t *testing.T, i *instance) {
		type seen struct {
			ID, Text, Role, Reason string
			Object                 string
			Chunks, Prompt, Output int
		}
		long := strings.Repeat("x", 300)
		for _, x := range []struct {
			path, id, body string
			want           seen
		}{
			{"/v1/completions", "", `{"prompt":"abc abc ab"}`, seen{"cmpl-1", "ash bay cup ", "", "stop", "text_completion", 1, 3, 3}},
			{"/v1/completions", "", `{"prompt":"abc abc ab","stream":true}`, seen{"cmpl-2", "ash bay cup ", "", "stop", "text_completion", 3, 0, 0}},
			{"/v1/completions", "r1", `{"prompt":[1,2,3,4],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}`, seen{"cmpl-r1", "ash bay ", "", "length", "text_completion", 2, 4, 2}},
			{"/v1/completions", "r1", `{"prompt":["abcde"],"max_tokens":27,"model":"m","n":1}`, seen{"cmpl-r1", "ash bay cup dew elm fog gem hay ivy jar key log map nut oak pea ray sea tin urn van wax yew zoo ash bay cup ", "", "length", "text_completion", 1, 2, 27}},
			{"/v1/chat/completions", long, `{"messages":[{"role":"user","content":"abcd"},{"role":"user","content":"a"}],"max_completion_tokens":1,"max_tokens":9}`, seen{"chatcmpl-" + long[:128], "ash ", "assistant", "length", "chat.completion", 1, 2, 1}},
			{"/v1/chat/completions", "r2", `{"messages":[{"role":"user","content":[{"type":"text","text":"abcde"}]},{"content":null}],"stream":true,"stream_options":{"include_usage":true}}`, seen{"chatcmpl-r2", "ash bay cup ", "assistant", "stop", "chat.completion.chunk", 4, 2, 3}},
			{"/v1/chat/completions", "r3", `{"messages":[{"content":""}],"stream":false,"unknown":{}}`, seen{"chatcmpl-r3", "ash bay cup ", "assistant", "stop", "chat.completion", 1, 1, 3}},
		} {
			status, answer := i.read(x.path, x.id, x.body)
			if status != http.StatusOK {
				t.Errorf("%s: %d %s", x.body, status, answer)
				continue
			}
			var chunks []chunk
			if strings.Contains(x.body, `"stream":true`) {
				chunks = events(t, answer)
			} else {
				chunks = []chunk{decode(t, answer)}
			}
			got := seen{ID: chunks[0].ID, Object: chunks[0].Object}
			for n, c := range chunks {
				if c.Usage != nil {
					got.Prompt, got.Output = c.Usage.Prompt, c.Usage.Completion
				}
				if len(c.Choices) == 0 {
					if c.Usage == nil || n != len(chunks)-1 {
						t.Errorf("%s: empty chunk %d", x.body, n)
					}
					continue
				}
				got.Chunks++
				o := c.Choices[0]
				got.Text += o.Text + o.Message.Content + o.Delta.Content
				got.Role += o.Message.Role + o.Delta.Role
				if o.FinishReason != nil {
					got.Reason += *o.FinishReason
				}
				if c.ID != got.ID || c.Object != got.Object || c.Model != "m" {
					t.Errorf("%s: chunk %d: %+v", x.body, n, c)
				}
			}
			if d := cmp.Diff(x.want, got); d != "" {
				t.Errorf("%s (-want +got):\n%s", x.body, d)
			}
		}
		i.end(7)
	})
}

func TestStreamIsTimely(t *testing.T) {
	// A token a millisecond, each seen when it is generated.
	bubble(t, engine.Config{Cost: simple}, func(t *testing.T, i *instance) {
		start := time.Now()
		r, err := i.do(t.Context(), "/v1/completions", "", body(4, 5, true))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		var at []time.Duration
		for sc := bufio.NewScanner(r.Body); sc.Scan(); {
			if sc.Text() != "" {
				at = append(at, time.Since(start))
			}
		}
		if d := cmp.Diff([]time.Duration{ms, 2 * ms, 3 * ms, 4 * ms, 5 * ms, 5 * ms}, at); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

func TestQueuedHeaders(t *testing.T) {
	bubble(t, engine.Config{MaxSeqs: 1, Cost: simple}, func(t *testing.T, i *instance) {
		var wg sync.WaitGroup
		wg.Go(func() { i.read("/v1/completions", "running", body(4, 1000, true)) })
		synctest.Wait()

		r, err := i.do(t.Context(), "/v1/completions", "queued", body(4, 1, true))
		if err != nil {
			t.Fatal(err)
		}
		if s := i.srv.Stats(); s.Running != 1 || s.Waiting != 1 || r.StatusCode != 200 || r.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
			t.Errorf("queued stream: %d %v, %+v", r.StatusCode, r.Header, s)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 500*ms)
		defer cancel()
		if r, err := i.do(ctx, "/v1/completions", "whole", body(4, 1, false)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("queued without stream: %v, %v", r, err)
		}
		b, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || len(events(t, string(b))) != 1 {
			t.Errorf("%v after %q", err, b)
		}
		wg.Wait()
		got := map[string]string{}
		for _, e := range i.end(3) {
			got[e.ID] = e.Reason
		}
		if d := cmp.Diff(map[string]string{"running": "length", "queued": "length", "whole": "abort"}, got); d != "" {
			t.Errorf("ends (-want +got):\n%s", d)
		}
	})
}

func TestDisconnectFreesWithinLagAndStep(t *testing.T) {
	const lag, step = 20 * ms, 10 * ms
	for _, x := range []struct {
		name   string
		mode   engine.AbortMode
		stream bool
		freed  bool
	}{
		{"streamed", engine.AbortAll, true, true},
		{"whole", engine.AbortAll, false, true},
		{"streamed, llama.cpp", engine.AbortStreaming, true, true},
		{"whole, llama.cpp", engine.AbortStreaming, false, false},
		{"leak", engine.AbortLeak, true, false},
		{"never", engine.AbortNever, true, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			bubble(t, engine.Config{MaxSeqs: 1, Cost: engine.Cost{Step: step}, AbortLag: lag, AbortMode: x.mode}, func(t *testing.T, i *instance) {
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() {
					r, err := i.do(ctx, "/v1/completions", "victim", body(100, 400, x.stream))
					if err == nil {
						io.ReadAll(r.Body)
						r.Body.Close()
					}
				})
				time.Sleep(205 * ms) // half way through a step
				if s := i.srv.Stats(); s.Running != 1 || s.BlocksUsed != 8 {
					t.Fatalf("before: %+v", s)
				}
				left := time.Now()
				cancel()
				wg.Wait()
				if time.Sleep(lag); i.srv.Stats().Running != 1 {
					t.Error("gone before the step boundary")
				}
				time.Sleep(step / 2)
				synctest.Wait()
				if s := i.srv.Stats(); (s.BlocksUsed == 0 && s.Running == 0) != x.freed {
					t.Errorf("after lag and step: %+v", s)
				}
				if x.mode == engine.AbortLeak {
					e := i.end(1)[0]
					if s := i.srv.Stats(); e.Reason != "abort" || s.BlocksUsed != 8 || s.Leaked != 1 {
						t.Errorf("%+v, %+v", e, s)
					}
					return
				}
				i.read("/v1/completions", "next", body(4, 1, true)) // gets in if and when the victim is gone
				e := i.end(2)[0]
				if e.Canceled != left || e.ID != "victim" || e.Stream != x.stream || e.PromptTokens != 100 {
					t.Errorf("%+v, left at %v", e, left)
				}
				want := fmt.Sprint("abort", 23, lag+step/2)
				if !x.freed {
					want = fmt.Sprint("length", 400, 400*step-205*ms)
				}
				if got := fmt.Sprint(e.Reason, e.Tokens, e.At.Sub(left)); got != want {
					t.Errorf("ended by %s, want %s", got, want)
				}
			})
		})
	}
}

func TestSlowClientDelaysNobody(t *testing.T) {
	bubble(t, engine.Config{Cost: simple}, func(t *testing.T, i *instance) {
		slow, err := i.pipes.dial(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		b := body(4, 500, true)
		fmt.Fprintf(slow, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
		synctest.Wait() // its handler is stuck in the write of the headers

		start := time.Now()
		_, answer := i.read("/v1/completions", "quick", body(4, 500, true))
		if got := len(events(t, answer)); got != 500 || time.Since(start) != 501*ms { // the step in flight, and its own
			t.Errorf("%d tokens in %v", got, time.Since(start))
		}
		if e := i.end(2); e[0].ID != "slow" || e[0].Reason != "length" {
			t.Errorf("%+v", e)
		}
		// The slow client still gets everything.
		r, err := http.ReadResponse(bufio.NewReader(slow), nil)
		if err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(r.Body)
		if got := len(events(t, string(all))); err != nil || got != 500 {
			t.Errorf("%d tokens, %v", got, err)
		}
		slow.Close()
	})
}

func TestWriteErrorAborts(t *testing.T) {
	bubble(t, engine.Config{Cost: simple}, func(t *testing.T, i *instance) {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/completions", strings.NewReader(body(4, 500, true)))
		i.srv.ServeHTTP(&broken{httptest.NewRecorder()}, r)
		time.Sleep(5 * ms)
		if e := i.end(1)[0]; e.Reason != "abort" {
			t.Errorf("%+v", e)
		}
	})
}

// broken fails to write.
type broken struct{ *httptest.ResponseRecorder }

func (*broken) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestClose(t *testing.T) {
	bubble(t, engine.Config{MaxSeqs: 1, Cost: simple}, func(t *testing.T, i *instance) {
		var wg sync.WaitGroup
		for _, id := range []string{"running", "queued"} {
			wg.Go(func() {
				r, err := i.do(t.Context(), "/v1/completions", id, body(4, 500, true))
				if err != nil {
					t.Error(err)
					return
				}
				defer r.Body.Close()
				if b, err := io.ReadAll(r.Body); err == nil {
					t.Errorf("%s ended properly: %q", id, b)
				}
			})
			time.Sleep(ms / 2)
		}
		wg.Go(func() {
			if status, answer := i.read("/v1/completions", "whole", body(4, 500, false)); status != 503 {
				t.Errorf("%d %s", status, answer)
			}
		})
		time.Sleep(10 * ms)
		i.srv.Close()
		for _, e := range i.end(3) {
			if e.Reason != "abort" || (e.Tokens > 0) != (e.ID == "running") {
				t.Errorf("%+v", e)
			}
		}
		wg.Wait()
		i.srv.Close()
		if status, _ := i.read("/v1/completions", "late", body(4, 1, true)); status != 503 {
			t.Errorf("after Close: %d", status)
		}
		if status, _ := i.read("/health", "", ""); status != 503 {
			t.Errorf("health after Close: %d", status)
		}
		if s := i.srv.Stats(); s.BlocksUsed+s.Running+s.Waiting != 0 || s.Aborted != 3 {
			t.Errorf("%+v", s)
		}
	})
}

func TestBadRequests(t *testing.T) {
	type fault struct {
		Status      int
		Param, Code string
	}
	const chat, plain = "/v1/chat/completions", "/v1/completions"
	s := engine.NewServer(engine.Config{Blocks: 4, Cost: engine.Cost{Step: time.Microsecond}})
	defer s.Close()
	for _, x := range []struct {
		method, path, body string
		want               fault
	}{
		{"POST", plain, ``, fault{400, "", ""}},
		{"POST", plain, `{`, fault{400, "", ""}},
		{"POST", plain, `null`, fault{400, "prompt", ""}},
		{"POST", plain, `[]`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":"a"}{}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":7}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":["a","b"]}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":""}`, fault{400, "prompt", ""}},
		{"POST", plain, `{"messages":[{"content":"a"}]}`, fault{400, "prompt", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":-1}`, fault{400, "max_tokens", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":0}`, fault{400, "max_tokens", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":1.5}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":1e30}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":1` + strings.Repeat("0", 100_000) + `}`, fault{400, "", ""}},
		{"POST", plain, `{"prompt":"a","max_tokens":9223372036854775807}`, fault{400, "max_tokens", "context_length_exceeded"}},
		{"POST", plain, `{"prompt":"a","max_tokens":65}`, fault{400, "max_tokens", "context_length_exceeded"}},
		{"POST", plain, `{"prompt":"` + text(65) + `"}`, fault{400, "max_tokens", "context_length_exceeded"}},
		{"POST", plain, `{"prompt":"a","n":2}`, fault{400, "n", ""}},
		{"POST", plain, `{"prompt":"a","model":"gpt"}`, fault{404, "model", "model_not_found"}},
		{"POST", plain, `{"prompt":"` + strings.Repeat("a", 8<<20) + `"}`, fault{413, "", ""}},
		{"POST", plain, strings.Repeat(`[`, 20_000), fault{400, "", ""}},
		{"POST", chat, `{}`, fault{400, "messages", ""}},
		{"POST", chat, `{"messages":[]}`, fault{400, "messages", ""}},
		{"POST", chat, `{"messages":"a"}`, fault{400, "", ""}},
		{"POST", chat, `{"messages":[{"content":{}}]}`, fault{400, "", ""}},
		{"POST", chat, `{"prompt":"a"}`, fault{400, "messages", ""}},
		{"GET", plain, ``, fault{405, "", ""}},
		{"POST", "/metrics", ``, fault{405, "", ""}},
		{"POST", "/", ``, fault{404, "", ""}},
		{"GET", "/v1/completions/", ``, fault{404, "", ""}},
	} {
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest(x.method, x.path, strings.NewReader(x.body)))
		var e struct {
			Error struct{ Message, Type, Param, Code string }
		}
		d := json.NewDecoder(w.Body)
		d.DisallowUnknownFields()
		err := d.Decode(&e)
		if diff := cmp.Diff(x.want, fault{w.Code, e.Error.Param, e.Error.Code}); diff != "" || err != nil {
			t.Errorf("%s %s %.40s: %v (-want +got)\n%s", x.method, x.path, x.body, err, diff)
		}
		if e.Error.Type != "invalid_request_error" || e.Error.Message == "" || len(e.Error.Message) > 300 || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%s %s %.40s: %+v %v", x.method, x.path, x.body, e.Error, w.Header())
		}
		if allow := w.Header().Get("Allow"); (allow != "") != (w.Code == 405) {
			t.Errorf("%s %s: allow %q", x.method, x.path, allow)
		}
	}
	if got := s.Stats(); got.Finished+got.Aborted+int64(got.Running+got.Waiting) != 0 {
		t.Errorf("something ran: %+v", got)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("POST", plain, strings.NewReader(`{"prompt":"`+text(60)+`"}`)))
	if c := decode(t, w.Body.String()); c.Usage == nil || c.Usage.Total != 65 || *c.Choices[0].FinishReason != "length" {
		t.Errorf("an answer that the pool cuts short: %+v", c)
	}
}

// metrics parses Prometheus' text format strictly: each sample stands below its HELP and TYPE and has a number.
func metrics(t *testing.T, s string) map[string]float64 {
	t.Helper()
	sample := regexp.MustCompile(`^([a-z:_]+)\{([a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*)\} (\S+)$`)
	m := map[string]float64{}
	name, kind := "", ""
	if !strings.HasSuffix(s, "\n") {
		t.Error("no newline at the end")
	}
	for line := range strings.Lines(s) {
		line = strings.TrimSuffix(line, "\n")
		f := strings.Fields(line)
		switch {
		case strings.HasPrefix(line, "# HELP ") && len(f) > 3:
			name, kind = f[2], ""
		case strings.HasPrefix(line, "# TYPE ") && len(f) == 4 && f[2] == name:
			kind = f[3]
		default:
			x := sample.FindStringSubmatch(line)
			if x == nil || x[1] != name || kind != "gauge" && kind != "counter" || strings.HasSuffix(name, "_total") != (kind == "counter") {
				t.Fatalf("bad line %q below %s %s", line, name, kind)
			}
			if name != "vllm:cache_config_info" && !strings.Contains(x[2], `model_name="m"`) {
				t.Errorf("no model in %q", line)
			}
			for _, label := range strings.Split(x[2], ",") {
				if reason, ok := strings.CutPrefix(label, "finished_reason="); ok {
					name += " " + reason
				}
			}
			v, err := strconv.ParseFloat(x[3], 64)
			if err != nil {
				t.Error(err)
			}
			m[name], name = v, x[1]
		}
	}
	return m
}

func TestMetrics(t *testing.T) {
	bubble(t, engine.Config{Model: "m", MaxSeqs: 2, Blocks: 40, Cost: simple}, func(t *testing.T, i *instance) {
		i.read("/v1/completions", "", body(10, 5, true))
		i.read("/v1/completions", "", `{"prompt":"abc","max_tokens":null}`) // 128 tokens
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 4 { // two run, one of them is preempted by and by
			wg.Go(func() {
				if r, err := i.do(ctx, "/v1/completions", "", body(300, 100, false)); err == nil {
					r.Body.Close()
				}
			})
			time.Sleep(ms / 8) // the first has a step for itself
		}
		time.Sleep(30 * ms)
		_, busy := i.read("/metrics", "", "")
		cancel()
		wg.Wait()
		time.Sleep(2 * ms)
		_, idle := i.read("/metrics", "", "")
		want := map[string]float64{
			"vllm:num_requests_running": 1, "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 21. / 40, "vllm:num_preemptions_total": 1,
			"vllm:prompt_tokens_total": 10 + 1 + 600, "vllm:generation_tokens_total": 5 + 128 + 30 + 20,
			`vllm:request_success_total "stop"`: 1, `vllm:request_success_total "length"`: 1, `vllm:request_success_total "abort"`: 0,
			"vllm:cache_config_info": 1,
		}
		got := metrics(t, busy)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("busy (-want +got):\n%s", d)
		}
		for k := range want {
			switch k {
			case "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc":
				want[k] = 0
			case "vllm:generation_tokens_total":
				want[k]++ // of the step in flight
			}
		}
		if d := cmp.Diff(want, metrics(t, idle)); d != "" {
			t.Errorf("idle (-want +got):\n%s", d)
		}

		status, models := i.read("/v1/models", "", "")
		var m struct {
			Object string
			Data   []struct {
				ID, Object  string
				MaxModelLen int `json:"max_model_len"`
			}
		}
		if err := json.Unmarshal([]byte(models), &m); err != nil || status != 200 || len(m.Data) != 1 || m.Data[0].ID != "m" || m.Data[0].MaxModelLen != 640 {
			t.Errorf("models: %d %s", status, models)
		}
		if status, _ := i.read("/health", "", ""); status != 200 {
			t.Errorf("health: %d", status)
		}
	})
}

// Real sockets, real time: clients leave at odd moments and others read to the end.
func TestOverTCP(t *testing.T) {
	ends := make(chan engine.End, 1000)
	s := engine.NewServer(engine.Config{Blocks: 60, MaxSeqs: 8, Cost: engine.DefaultCost.Scale(0.02), OnEnd: func(e engine.End) { ends <- e }})
	hs := httptest.NewServer(s)
	const n = 60
	var wg sync.WaitGroup
	for k := range n {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			stream, stays := k%2 == 0, k%3 == 0
			r, _ := http.NewRequestWithContext(ctx, "POST", hs.URL+"/v1/completions", strings.NewReader(body(50+k, 60, stream)))
			r.Header.Set("X-Request-Id", fmt.Sprint(k))
			if !stays {
				time.AfterFunc(time.Duration(k)*ms/2, cancel)
			}
			res, err := hs.Client().Do(r)
			if err == nil {
				defer res.Body.Close()
				var b []byte
				if b, err = io.ReadAll(res.Body); err == nil && stays && stream && len(events(t, string(b))) != 60 {
					t.Errorf("%d: %q", k, b)
				}
			}
			if stays && err != nil {
				t.Errorf("%d: %v", k, err)
			}
		})
	}
	wg.Wait()
	deadline := time.Now().Add(5 * time.Second)
	for x := s.Stats(); x.Running+x.Waiting > 0 && time.Now().Before(deadline); x = s.Stats() {
		time.Sleep(ms)
	}
	if x := s.Stats(); x.BlocksUsed != 0 || x.Running != 0 || x.Waiting != 0 {
		t.Errorf("%+v", x)
	}
	hs.Close()
	s.Close()
	close(ends)
	seen := map[string]bool{}
	for e := range ends {
		if seen[e.ID] || (e.Reason == "length") != (e.Tokens == 60) || e.Reason == "abort" && e.Canceled.IsZero() {
			t.Errorf("%+v, again: %t", e, seen[e.ID])
		}
		seen[e.ID] = true
	}
	for k := 0; k < n; k += 3 {
		if !seen[fmt.Sprint(k)] {
			t.Errorf("%d never ended", k)
		}
	}
}

func FuzzBody(f *testing.F) {
	s := engine.NewServer(engine.Config{Blocks: 8, Cost: engine.Cost{Step: time.Microsecond}})
	f.Cleanup(s.Close)
	for _, b := range []string{`{"prompt":"a","stream":true}`, `{"messages":[{"content":[{"text":"a"}]}],"max_tokens":3}`, `{"prompt":[1,2],"n":1,"stream_options":null}`} {
		f.Add([]byte(b), true)
		f.Add([]byte(b), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, chat bool) {
		path := "/v1/completions"
		if chat {
			path = "/v1/chat/completions"
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest("POST", path, bytes.NewReader(b)))
		if w.Code != 200 && w.Code != 400 && w.Code != 404 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		if w.Header().Get("Content-Type") != "application/json" {
			events(t, w.Body.String())
		} else if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%q", w.Body)
		}
	})
}
