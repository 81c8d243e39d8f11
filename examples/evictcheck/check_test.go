package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/admin"
	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/envoy"
)

// start starts a setup in process and returns a config that checks it.
func start(t *testing.T, s setup) config {
	t.Helper()
	d, err := startDemo(t.Context(), s, "in-process")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return config{
		gateway: d.gateway, metrics: d.metrics, engine: d.engine, admin: d.admin, path: "/v1/completions", header: make(http.Header),
		names: defaultNames(), streams: demoSlots, prompt: 2000, tokens: 2000, effect: 800 * time.Millisecond, every: 10 * time.Millisecond,
	}
}

// front starts a proxy before a URL that changes requests and responses.
func front(t *testing.T, target string, rewrite func(*http.Request), modify func(*http.Response) error) string {
	t.Helper()
	p := newProxy(t, target)
	p.ModifyResponse = modify
	p.Rewrite = func(r *httputil.ProxyRequest) {
		u := parsed(t, target)
		r.SetURL(&url.URL{Scheme: u.Scheme, Host: u.Host})
		rewrite(r.Out)
	}
	return serve(t, p)
}

// newProxy returns a proxy before a URL, with a transport of its own.
func newProxy(t *testing.T, target string) *httputil.ReverseProxy {
	transport := new(http.Transport)
	t.Cleanup(transport.CloseIdleConnections)
	u := parsed(t, target)
	return &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(u) },
		Transport: transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}
}

// queue starts a proxy that lets three requests through at a time; whether it notices
// when one ends is the caller's choice.
func queue(t *testing.T, target string, notices bool) string {
	next := newProxy(t, target)
	slots := make(chan bool, 3)
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b, err := io.ReadAll(r.Body); err == nil {
			if r.Body = io.NopCloser(bytes.NewReader(b)); bytes.Contains(b, []byte(`"stream":false`)) {
				next.ServeHTTP(w, r)
				return
			}
		}
		select {
		case slots <- true:
			if notices {
				defer func() { <-slots }()
			}
			next.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
}

// serve starts a server and returns its URL.
func serve(t *testing.T, h http.Handler) string {
	s := httptest.NewServer(fullDuplex(h.ServeHTTP))
	t.Cleanup(s.Close)
	return s.URL
}

func parsed(t *testing.T, text string) *url.URL {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func same(*http.Request)          {}
func asIs(*http.Response) error   { return nil }
func (r *Report) verdict() string { return fmt.Sprintf("%s %s", r.Verdict, r.Reason) }

// TestCheck checks deployments and gateways that the demos don't have.
func TestCheck(t *testing.T) {
	normal, ignore, swallow := setups[0], setups[1], setups[3]
	const some = -1 // evictions
	// metrics answers with what change makes of the engine's.
	metrics := func(t *testing.T, c *config, change func(name, value string) string) {
		c.metrics = front(t, c.metrics, same, func(r *http.Response) error {
			var b bytes.Buffer
			for lines := bufio.NewScanner(r.Body); lines.Scan(); {
				line := lines.Text()
				if name, _, ok := strings.Cut(line, "{"); ok {
					cut := strings.LastIndexByte(line, ' ')
					line = line[:cut+1] + change(name, line[cut+1:])
				}
				fmt.Fprintln(&b, line)
			}
			r.Body, r.ContentLength = io.NopCloser(&b), int64(b.Len())
			r.Header.Del("Content-Length")
			return nil
		}) + "/metrics"
	}
	for _, c := range []struct {
		name    string
		setup   setup
		change  func(*testing.T, *config)
		want    string // verdict and reason
		says    string // somewhere in the text
		evicted int
	}{
		{"chat", normal, func(_ *testing.T, c *config) { c.path = "/v1/chat/completions" }, "yes freed", "", 3},
		{"a gateway that asks for a key", normal, func(t *testing.T, c *config) {
			c.header.Set("Authorization", "Bearer key")
			next := newProxy(t, c.gateway)
			c.gateway = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "Bearer key" {
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				next.ServeHTTP(w, r)
			}))
		}, "yes freed", "", 3},
		{"not full", normal, func(_ *testing.T, c *config) { c.streams = 2 }, "yes freed", "the engine took all 3 streams at once: with -streams 6", 2},
		{"the gateway has a queue", normal, func(t *testing.T, c *config) { c.gateway, c.effect = queue(t, c.gateway, true), time.Second },
			"yes freed", "3 streams ran, and one more had to wait: running 3, waiting 0", 3},
		{"the gateway has a queue that is stuck", normal, func(t *testing.T, c *config) { c.gateway, c.effect = queue(t, c.gateway, false), time.Second },
			"yes freed", "the engine ran one request less", 3},
		{"more than full", normal, func(_ *testing.T, c *config) { c.streams = 7 }, "yes freed", "4 streams ran, and 3 had to wait", 3},
		{"the gateway names requests, the engine repeats it", normal, func(t *testing.T, c *config) {
			c.gateway = front(t, c.gateway, func(r *http.Request) {
				r.Header.Set("X-Request-Id", strings.Replace(r.Header.Get("X-Request-Id"), "evictcheck", "gateway", 1))
			}, asIs)
		}, "yes freed", "a request that is not streamed was not tried", 2},
		{"the gateway names requests, and says so", normal, func(t *testing.T, c *config) {
			c.gateway = front(t, c.gateway, func(r *http.Request) {
				r.Header.Set("X-Request-Id", strings.Replace(r.Header.Get("X-Request-Id"), "evictcheck-", "", 1)[:16])
			}, func(r *http.Response) error {
				r.Header.Set("X-Request-Id", r.Request.Header.Get("X-Request-Id"))
				return nil
			})
		}, "yes freed", "an id of its own", 2},
		{"the gateway names requests", normal, func(t *testing.T, c *config) {
			c.gateway = front(t, c.gateway, func(r *http.Request) { r.Header.Set("X-Request-Id", r.Header.Get("X-Request-Id")[:15]) }, asIs)
		}, "unknown ids_differ", "preserve_external_request_id: true", 0},
		{"the gateway buffers", normal, func(t *testing.T, c *config) {
			c.gateway = front(t, c.gateway, same, func(r *http.Response) error {
				b, err := io.ReadAll(r.Body)
				r.Body = io.NopCloser(bytes.NewReader(b))
				return err
			})
		}, "unknown held_back", "not BUFFERED", 0},
		{"a disabled filter that is full duplex", setup{filter: envoy.ExtProc{Mode: evictable, DisableImmediateResponse: true, FailureModeAllow: true}}, func(_ *testing.T, c *config) { c.effect = time.Second },
			"no gateway_runs_on", "only streams in full flow end", 3},
		{"a hop, and the engine unknown", swallow, func(_ *testing.T, c *config) { c.engine = "" }, "no engine_or_hop", "-engine URL tells", 1},
		{"a hop, and the engine elsewhere", swallow, func(_ *testing.T, c *config) { c.engine = "http://127.0.0.1:1" }, "no engine_or_hop", "the engine was not asked alone: ", 1},
		{"an engine that ignores ends, and soon finishes", ignore, func(_ *testing.T, c *config) { c.effect = 3 * time.Second }, "no engine_ignores_close", "closed: the request runs on", 1},
		{"another engine's metrics", normal, func(t *testing.T, c *config) {
			e := engine.NewServer(engine.Config{})
			t.Cleanup(e.Close)
			c.metrics, c.streams = serve(t, e)+"/metrics", 2
		}, "unknown runs_elsewhere", "-metrics of the engine that serves them", 0},
		{"no metrics", normal, func(_ *testing.T, c *config) { c.metrics += "/none" }, "unknown unreachable", "404", 0},
		{"other metrics", normal, func(_ *testing.T, c *config) { c.names["running"] = []string{"up", "down"} }, "unknown unreachable", "no metric up or down: name yours with -metric running=NAME", 0},
		{"no admin endpoint", normal, func(_ *testing.T, c *config) { c.admin = "http://127.0.0.1:1" }, "unknown unreachable", "/requests", 0},
		{"another admin endpoint", normal, func(_ *testing.T, c *config) { c.admin = c.engine }, "unknown unreachable", "404 Not Found", 0},
		{"no gateway", normal, func(_ *testing.T, c *config) { c.gateway = "http://127.0.0.1:1" }, "unknown unreachable", "refused", 0},
		{"another path", normal, func(_ *testing.T, c *config) { c.path = "/v2" }, "unknown unreachable", "the gateway did not serve a stream: status 404", 0},
		{"another model", normal, func(_ *testing.T, c *config) { c.model = "gpt" }, "unknown unreachable", "model_not_found", 0},
		{"short streams", normal, func(_ *testing.T, c *config) { c.tokens = 20 }, "unknown streams_too_short", "-max-tokens above 20", some},
		{"shorter streams", normal, func(_ *testing.T, c *config) { c.tokens, c.engine = 1, "" }, "unknown streams_too_short", "-max-tokens above 1", 0},
		{"streams that end while it looks", swallow, func(_ *testing.T, c *config) { c.tokens, c.effect = 100, 10*time.Second }, "unknown streams_too_short", "a shorter -effect", some},
		{"only running is known", normal, func(_ *testing.T, c *config) {
			c.names, c.effect = names{"running": {"vllm:num_requests_running"}}, time.Second
		}, "yes freed", "running 4, waiting ?\n", 3},
		{"the KV cache stays full", normal, func(t *testing.T, c *config) {
			c.streams = 2
			metrics(t, c, func(name, value string) string {
				if name == "vllm:kv_cache_usage_perc" && value != "0" {
					return "0.9"
				}
				return value
			})
		}, "no kv_cache_kept", "keeps the blocks", 1},
		{"others end meanwhile", normal, func(t *testing.T, c *config) {
			n := 0
			metrics(t, c, func(name, value string) string {
				switch name {
				case "vllm:num_requests_running":
					f, _ := strconv.ParseFloat(value, 64)
					return fmt.Sprint(f + 1)
				case "vllm:request_success_total":
					n++
					return fmt.Sprint(n)
				}
				return value
			})
			c.engine = ""
		}, "unknown disturbed", "others ended in the same moment", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			config := start(t, c.setup)
			if strings.HasPrefix(c.want, yes) {
				config.effect = 10 * time.Second // it is over when all is seen
			}
			c.change(t, &config)
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errTimeout)
			defer cancel()
			var progress strings.Builder
			r := run(ctx, config, func(who, format string, a ...any) { fmt.Fprintf(&progress, who+" "+format+"\n", a...) })
			var text strings.Builder
			r.writeText(&text)
			if d := cmp.Diff(c.want, r.verdict()); d != "" || !strings.Contains(text.String(), c.says) || c.evicted != some && len(r.Evictions) != c.evicted {
				t.Errorf("%d evictions, want %d and %q; verdict (-want +got):\n%s%s\n%s", len(r.Evictions), c.evicted, c.says, d, &progress, &text)
			}
		})
	}
}

// TestHangsUp checks that an interrupted check leaves the engine as it was.
func TestHangsUp(t *testing.T) {
	c := start(t, setups[0])
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := 0
	r := run(ctx, c, func(who, format string, a ...any) {
		if strings.HasPrefix(format, "%d streams run, ") {
			seen++
			cancel()
		}
	})
	if seen != 1 || r.verdict() != "unknown interrupted" {
		t.Fatalf("%s, seen to run: %d", r.verdict(), seen)
	}
	for range 100 {
		if m, err := readMetrics(t.Context(), http.DefaultClient, c.metrics, c.names); err != nil || m.running == 0 && m.waiting == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the engine still runs its requests")
}

// TestFind checks that a request that is not the check's is never taken for its own.
func TestFind(t *testing.T) {
	var registry abort.Registry
	own, _ := abort.New(t.Context())
	defer own.Close()
	for _, id := range []string{"1", "cmpl-1", "evictcheck-", "somebody-elses-request"} {
		registry.Add(id, own.Handle())
	}
	const sent = "evictcheck-abcdefghij"
	for _, c := range []struct {
		named []string // by the response
		adds  string   // the id by which the gateway registers it
		query string
	}{
		{nil, "", ""},
		{[]string{"1", "cmpl-1"}, "", ""},
		{nil, sent, "id=" + sent},
		{[]string{"cmpl-" + sent + "-0"}, "", ""},
		{[]string{"the-gateways-own-id"}, "the-gateways-own-id", "id=the-gateways-own-id"},
		{[]string{"cmpl-the-gateways-own-id-0"}, "the-gateways-own-id", "id=the-gateways-own-id"},
		{[]string{"cmpl-short-id-0"}, "short-id", ""},
	} {
		o := &operator{client: http.DefaultClient, url: serve(t, admin.Handler(admin.Config{Registry: &registry, Evictor: evictor.New()}))}
		mine, _ := abort.New(t.Context())
		if c.adds != "" {
			registry.Add(c.adds, mine.Handle())
		}
		query, listed, err := o.find(t.Context(), &stream{id: sent, s: seen{ids: c.named}})
		if err != nil || query != c.query || listed == 0 {
			t.Errorf("%q, registered as %q: found by %q, of %d, error %v; want %q", c.named, c.adds, query, listed, err, c.query)
		}
		mine.Close()
	}
}

func TestEnds(t *testing.T) {
	const token, rest = "data: {\"id\":\"cmpl-1\",\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\n\n", "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"%s\"}]}\r\n\r\ndata: [DONE]\n\n"
	for _, c := range []struct {
		name, body string
		status     int
		cut        bool
		how, text  string
		tokens     int
	}{
		{"complete", token + fmt.Sprintf(rest, "length"), 200, false, endComplete, "complete", 2},
		{"aborted by the engine", token + fmt.Sprintf(rest, "abort"), 200, false, endClean, "a clean end, as if the answer were complete,", 2},
		{"cut", ": comment\n\n" + token, 200, true, endReset, "reset", 1},
		{"short", token, 200, false, endClean, "a clean end, as if the answer were complete,", 1},
		{"event", token + "data:{\"error\":{\"message\":\"m\",\"type\":\"t\",\"code\":\"c\"}}\n\n", 200, true, endEventReset, `error event "c", reset`, 1},
		{"event, clean", token + "event: error\ndata: {\"error\":{\"message\":\"m\",\"code\":429}}\n\n", 200, false, endEventClean, `error event "m", clean end`, 1},
		{"no JSON", "data: {\n\ndata: 1\n\ndata: []\n\n", 200, true, endReset, "reset", 0},
		{"status", "{\"error\":{\"type\":\"t\"}}", 429, false, endStatus, `status 429, error "t",`, 0},
		{"status, other body", "busy\n\x1b[2J", 503, false, endStatus, `status 503 "busy\n\x1b[2J"`, 0},
		{"status, no body", "", 500, false, endStatus, "status 500 without a body", 0},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c.status == 200 {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			w.WriteHeader(c.status)
			io.WriteString(w, c.body)
			if c.cut {
				http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
		}))
		k := &check{config: config{path: "/v1/completions", prompt: 10, header: make(http.Header)}, client: s.Client()}
		st := k.start(t.Context(), s.URL, true, 1)
		<-st.over
		s.Close()
		v := st.look()
		if d := cmp.Diff([]any{c.how, c.text, c.tokens}, []any{v.how(), v.text(time.Time{}), v.tokens}); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

func TestPrompts(t *testing.T) {
	for _, n := range []int{1, 7, 2000} {
		if a, b := newPrompt(n), newPrompt(n); len(a) != n || n > 1 && a == b {
			t.Errorf("%d bytes: %q, %q", n, a, b)
		}
	}
}
