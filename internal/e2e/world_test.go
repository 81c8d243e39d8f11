// Package e2e_test holds the library against a real Envoy with real HTTP clients, and
// extproctest's fake against the same.
//
// A world is everything behind the clients: an ext_proc server and a backend that
// know each call, an Envoy in front of them, and the fake. A path is a way through:
// Envoy with HTTP/1.1, Envoy with HTTP/2, or the fake. What a test expects, it expects
// of every path.
//
// Without a real Envoy these tests fail; they never skip. See envoy.Find.
package e2e_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
	"github.com/extevict/extevict/internal/envoy"
)

// patience is how long a test waits for what must happen: only a hang takes it.
const patience = 30 * time.Second

// messageTimeout is the filters', longer than any test waits.
const messageTimeout = 2 * patience

// A mode is how Envoy asks the ext_proc server, named after its response body mode.
// The request's body is treated as the response's.
type mode envoy.ProcessingMode

var (
	none     = mode{ResponseTrailers: envoy.Send}
	streamed = mode{RequestBody: envoy.Streamed, ResponseBody: envoy.Streamed}
	buffered = mode{RequestBody: envoy.Buffered, ResponseBody: envoy.Buffered}
	duplex   = mode{
		RequestBody: envoy.FullDuplexStreamed, RequestTrailers: envoy.Send,
		ResponseBody: envoy.FullDuplexStreamed, ResponseTrailers: envoy.Send,
	}
	modes = []mode{none, streamed, buffered, duplex}
)

func (m mode) String() string { return cmp.Or(string(m.ResponseBody), string(envoy.None)) }

// buffers reports whether Envoy withholds a body until it is complete, if it is small.
func (m mode) buffers() bool {
	return m.ResponseBody == envoy.Buffered || m.ResponseBody == envoy.BufferedPartial
}

// keeps reports whether Envoy needs the ext_proc stream until the response's end. Else
// it ends the stream early, since 1.37.
func (m mode) keeps() bool { return m.ResponseBody != "" || m.ResponseTrailers == envoy.Send }

// proto returns m as the fake takes it.
func (m mode) proto() *filterpb.ProcessingMode {
	headers := func(h envoy.HeaderMode) filterpb.ProcessingMode_HeaderSendMode {
		return filterpb.ProcessingMode_HeaderSendMode(filterpb.ProcessingMode_HeaderSendMode_value[string(h)])
	}
	body := func(b envoy.BodyMode) filterpb.ProcessingMode_BodySendMode {
		return filterpb.ProcessingMode_BodySendMode(filterpb.ProcessingMode_BodySendMode_value[string(b)])
	}
	return &filterpb.ProcessingMode{
		RequestHeaderMode: headers(m.RequestHeaders), ResponseHeaderMode: headers(m.ResponseHeaders),
		RequestBodyMode: body(m.RequestBody), ResponseBodyMode: body(m.ResponseBody),
		RequestTrailerMode: headers(m.RequestTrailers), ResponseTrailerMode: headers(m.ResponseTrailers),
	}
}

// A setup is what worlds differ in. Its zero fields have defaults.
type setup struct {
	bin          string // the Envoy: ENVOY_BIN
	mode         mode
	filter       envoy.ExtProc // its address, mode and timeout are the world's
	adopt        adoption
	evictor      *evictor.Evictor
	backend      http.Handler   // the world: what each call says
	delayedClose *time.Duration // 100 ms
	opts         []extproc.Option
	wrong        bool // the ext_proc server does what the fake complains about
}

// A world is an ext_proc server, a backend, and the paths to them.
type world struct {
	testing.TB
	mode     mode
	ev       *evictor.Evictor
	registry abort.Registry // of x-request-id
	paths    []*path

	mu      sync.Mutex // guards what follows
	calls   map[string]*call
	handles map[*abort.Handle]*call
}

// A path is a way from a client to the backend.
type path struct {
	name   string // h1, h2 or fake
	envoy  string // its version, "" for the fake
	client *http.Client
	url    string
	reset  func(error) bool // whether a client that gets this error reading a body saw a reset
	log    func() ([]line, error)
	// passed waits until the proxy has all of the response of the only call in flight.
	passed func(*call) error
}

// A line is a request's in the access log.
type line struct {
	Path    string
	Code    int
	Details string
	Evicted string // what an ErrorEvent's CleanEnd leaves in the dynamic metadata
}

// start runs a world until the end of the test, when nothing may be left of its
// requests.
func start(t testing.TB, s setup) *world {
	t.Helper()
	w := &world{TB: t, mode: s.mode, ev: s.evictor, calls: make(map[string]*call), handles: make(map[*abort.Handle]*call)}
	if w.ev == nil {
		w.ev = evictor.New()
	}
	if s.adopt == nil {
		s.adopt = wrapped
	}
	if s.backend == nil {
		s.backend = w
	}
	gs, server := s.adopt(w.process, append(s.opts, extproc.WithObserver(w.observe), extproc.WithRegistry(&w.registry))...)
	hs := &http.Server{Handler: s.backend}
	extProc, upstream := listen(t), listen(t)
	var wg sync.WaitGroup
	wg.Go(func() { gs.Serve(extProc) })
	wg.Go(func() { hs.Serve(upstream) })
	t.Cleanup(func() {
		gs.Stop()
		hs.Close()
		wg.Wait()
	})
	w.paths = append(w.envoy(s, extProc.Addr().String(), upstream.Addr().String()), w.fake(s, server))
	t.Cleanup(w.leftovers)
	return w
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// envoy returns the paths through a real Envoy.
func (w *world) envoy(s setup, extProc, upstream string) []*path {
	w.Helper()
	bin := s.bin
	if bin == "" {
		bin = found(w)
	}
	version := versionOf(w, bin)
	filter := s.filter
	filter.Address, filter.Mode, filter.MessageTimeout = extProc, envoy.ProcessingMode(s.mode), messageTimeout
	if s.delayedClose == nil {
		s.delayedClose = new(100 * time.Millisecond)
	}
	e, err := envoy.Start(w.Context(), bin, envoy.Config{
		ExtProc:      []envoy.ExtProc{filter},
		Upstream:     envoy.Upstream{Endpoints: []string{upstream}},
		DelayedClose: s.delayedClose,
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := e.Close(); err != nil {
			w.Error(err)
		}
	})
	log := func() (lines []line, err error) {
		entries, err := e.AccessLog()
		for _, e := range entries {
			m, _ := e.Metadata[extproc.MetadataNamespace].(map[string]any)
			evicted, _ := m["evicted"].(string)
			lines = append(lines, line{e.Path, e.Code, e.Details, evicted})
		}
		return lines, err
	}
	passed := func(c *call) error {
		if err := c.await(backendDone); err != nil {
			return err
		}
		var err error
		if !eventually(func() bool {
			var stats map[string]uint64
			stats, err = e.Stats(w.Context())
			return err != nil || stats["cluster.upstream.upstream_rq_active"] == 0
		}) {
			err = errors.New("in vain: the end of the request to the upstream")
		}
		return err
	}
	client := func(h2 bool) *http.Client {
		tr := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
		tr.Protocols.SetHTTP1(!h2)
		tr.Protocols.SetUnencryptedHTTP2(h2)
		w.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	code := "INTERNAL_ERROR" // of RST_STREAM
	if is(version, "1.36") {
		code = "NO_ERROR"
	}
	return []*path{
		{name: "h1", envoy: version, url: e.URL(), log: log, passed: passed, client: client(false), reset: func(err error) bool {
			return err == io.ErrUnexpectedEOF // the connection was closed without a last chunk
		}},
		{name: "h2", envoy: version, url: e.URL(), log: log, passed: passed, client: client(true), reset: func(err error) bool {
			return err != nil && strings.HasSuffix(err.Error(), "; "+code+"; received from peer")
		}},
	}
}

// fake returns the path through extproctest's Envoy. What that has to complain about
// is an error.
func (w *world) fake(s setup, server extprocpb.ExternalProcessorServer) *path {
	var mu sync.Mutex // guards lines
	var lines []line
	return &path{
		name: "fake",
		url:  "http://fake",
		log: func() ([]line, error) {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(lines), nil
		},
		reset:  func(err error) bool { return errors.Is(err, extproctest.ErrReset) },
		passed: func(c *call) error { return c.await(passed) },
		client: &http.Client{Transport: &extproctest.Envoy{
			Server:   server,
			Upstream: watched{w, extproctest.Handler(s.backend)},
			Config: &filterpb.ExternalProcessor{
				ProcessingMode:           s.mode.proto(),
				MessageTimeout:           durationpb.New(messageTimeout),
				FailureModeAllow:         s.filter.FailureModeAllow,
				AllowModeOverride:        s.filter.AllowModeOverride,
				DisableImmediateResponse: s.filter.DisableImmediateResponse,
				ObservabilityMode:        s.filter.ObservabilityMode,
				MetadataOptions: &filterpb.MetadataOptions{ReceivingNamespaces: &filterpb.MetadataOptions_MetadataNamespaces{
					Untyped: s.filter.ReceivingNamespaces,
				}},
			},
			AccessLog: func(e extproctest.Entry) {
				mu.Lock()
				defer mu.Unlock()
				evicted := e.Metadata[extproc.MetadataNamespace].GetFields()["evicted"].GetStringValue()
				lines = append(lines, line{e.Path, e.Code, e.Details, evicted})
			},
			Errorf: func(format string, args ...any) {
				if !s.wrong {
					w.Errorf(format, args...)
				}
			},
		}},
	}
}

// watched marks when a response has been read.
type watched struct {
	w *world
	http.RoundTripper
}

func (t watched) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(r)
	if c := t.w.find(r.URL.RequestURI()); c != nil && err == nil {
		resp.Body = &watchedBody{resp.Body, c}
	}
	return resp, err
}

type watchedBody struct {
	io.ReadCloser
	c *call
}

func (b *watchedBody) Close() error {
	b.c.set(passed)
	return b.ReadCloser.Close()
}

// leftovers fails the test if something of its requests does not go away.
func (w *world) leftovers() {
	if w.Failed() {
		return // calls may be stuck
	}
	var left string
	if !eventually(func() bool {
		left = extprocStacks()
		return left == "" && w.ev.Len() == 0 && w.registry.Len() == 0
	}) {
		w.Errorf("left over: %d tracked, %d registered, goroutines:\n%s", w.ev.Len(), w.registry.Len(), left)
	}
}

// extprocStacks returns the stacks of goroutines that are in package extproc.
func extprocStacks() string {
	buf := make([]byte, 8<<20)
	var left []string
	for s := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(s, "/extevict/extproc.") {
			left = append(left, s)
		}
	}
	return strings.Join(left, "\n\n")
}

// eventually reports whether f becomes true: for what has no event to wait for.
func eventually(f func() bool) bool {
	for deadline := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// line returns the access log's line for a call that is over.
func (w *world) line(c *call) (l line, err error) {
	if !eventually(func() bool {
		var lines []line
		lines, err = c.path.log()
		i := slices.IndexFunc(lines, func(l line) bool { return l.Path == c.uri })
		if i >= 0 {
			l = lines[i]
		}
		return err != nil || i >= 0
	}) {
		err = errors.New("not in the access log")
	}
	return l, err
}

// observe is told how each request ended.
func (w *world) observe(e extproc.Event) {
	w.mu.Lock()
	c := w.handles[e.Handle]
	w.mu.Unlock()
	if c == nil {
		w.Errorf("an event of an unknown request: %+v", e)
		return
	}
	c.event = e
	c.set(observed)
}

// start sends the call. The client leaves when ctx is done.
func (w *world) start(ctx context.Context, c *call) *call {
	w.mu.Lock()
	w.calls[c.uri] = c
	w.mu.Unlock()
	go c.do(ctx) // ends with the response
	return c
}

// find returns the call with the given path and query.
func (w *world) find(uri string) *call {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls[uri]
}

// ServeHTTP is the backend.
func (w *world) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	c := w.find(r.URL.RequestURI())
	if c == nil {
		w.Errorf("the backend got an unknown call: %s", r.URL)
		return
	}
	c.serve(rw, r)
}

// evict has the call's request evicted and no other.
func (w *world) evict(c *call) ([]*abort.Handle, error) {
	c.evictedAt = time.Now()
	return w.ev.Evict(context.Background(), evictor.Demand{N: 1, Below: 1, Endpoint: c.uri, Reason: abort.Preempted})
}
