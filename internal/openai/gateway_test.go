package openai_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

// patience is how long a test waits for what must happen: only a hang takes it.
const patience = 30 * time.Second

// A setting is what gateways differ in.
type setting struct {
	name  string
	mode  envoy.ProcessingMode
	event extproc.ErrorEvent
}

var (
	duplex   = envoy.ProcessingMode{ResponseBody: envoy.FullDuplexStreamed, ResponseTrailers: envoy.Send}
	settings = []setting{
		{"FULL_DUPLEX_STREAMED", duplex, extproc.ErrorEvent{}},
		{"CleanEnd", duplex, extproc.ErrorEvent{CleanEnd: true}},
		{"STREAMED", envoy.ProcessingMode{ResponseBody: envoy.Streamed}, extproc.ErrorEvent{Wait: patience}},
		{"NONE", envoy.ProcessingMode{ResponseTrailers: envoy.Send}, extproc.ErrorEvent{}},
	}
)

// A gateway is a real Envoy with an endpoint picker, in front of a model. Its clients
// put their name and a plan into the path: /CLIENT/PLAN/v1/chat/completions.
type gateway struct {
	testing.TB
	setting
	url      string
	model    string         // ip:port
	requests abort.Registry // by path
}

func start(t testing.TB, s setting) *gateway {
	t.Helper()
	g := &gateway{TB: t, setting: s}
	bin, err := envoy.Find()
	if err != nil {
		t.Fatal(err)
	}
	gs := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(gs, extproc.Wrap(picker{g}, extproc.WithErrorEvent(s.event)))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{client}/{plan}/v1/chat/completions", g.complete)
	hs := &http.Server{Handler: mux}
	extProc, model := listen(t), listen(t)
	g.model = model.Addr().String()
	var wg sync.WaitGroup
	wg.Go(func() { gs.Serve(extProc) })
	wg.Go(func() { hs.Serve(model) })
	t.Cleanup(func() {
		gs.Stop()
		hs.Close()
		wg.Wait()
	})
	e, err := envoy.Start(t.Context(), bin, envoy.Config{
		ExtProc:      []envoy.ExtProc{{Address: extProc.Addr().String(), Mode: s.mode}},
		Upstream:     envoy.Upstream{ByHeader: true},
		DelayedClose: new(50 * time.Millisecond),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	g.url = e.URL()
	return g
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// base returns the base URL of a client's API.
func (g *gateway) base(client string, p plan) string {
	return g.url + "/" + client + "/" + string(p) + "/v1"
}

// evict has the client's request evicted.
func (g *gateway) evict(client string, p plan) (evicted bool) {
	return g.requests.Abort("/"+client+"/"+string(p)+"/v1/chat/completions", abort.Preempted) == 1
}

// A picker is the gateway's ext_proc server. It sends every request to the model, and
// looks at the whole response if the mode lets it.
type picker struct{ *gateway }

func (p picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		req, err := st.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		resp := &extprocpb.ProcessingResponse{}
		switch r := req.GetRequest().(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			p.requests.Add(path(r.RequestHeaders.GetHeaders()), abort.FromContext(st.Context()))
			resp.Response = &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{Response: p.pick()}}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}
		case *extprocpb.ProcessingRequest_ResponseBody:
			resp.Response = &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{Response: p.pass(r.ResponseBody)}}
		case *extprocpb.ProcessingRequest_ResponseTrailers:
			resp.Response = &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}

func path(h *corepb.HeaderMap) string {
	for _, v := range h.GetHeaders() {
		if v.GetKey() == ":path" {
			return string(v.GetRawValue())
		}
	}
	return ""
}

func (p picker) pick() *extprocpb.CommonResponse {
	return &extprocpb.CommonResponse{HeaderMutation: &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{{
		Header:       &corepb.HeaderValue{Key: envoy.EndpointHeader, RawValue: []byte(p.model)},
		AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}}}}
}

// pass returns what lets a part of the body pass.
func (p picker) pass(b *extprocpb.HttpBody) *extprocpb.CommonResponse {
	if p.mode != duplex {
		return nil
	}
	return &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_StreamedResponse{
		StreamedResponse: &extprocpb.StreamedBodyResponse{Body: b.GetBody(), EndOfStream: b.GetEndOfStream()},
	}}}
}

// A plan is when a request is evicted.
type plan string

const (
	waiting   plan = "waiting"    // before the response headers: the model does it
	midAnswer plan = "mid-answer" // behind the first words
	midEvent  plan = "mid-event"  // behind the first words and a part of an event
	untouched plan = "untouched"  // never
	random    plan = "random"     // at any time, from an answer cut anywhere
)

var plans = []plan{waiting, midAnswer, midEvent, untouched}

// Of every answer these are the first words, and the rest.
var first, rest = []string{"ash ", "bay ", "cup "}, []string{"dew ", "elm ", "fog "}

// answer is the data of all events of an answer.
func answer() (data []string) {
	for _, s := range append(first[:len(first):len(first)], rest...) {
		data = append(data, chunk(s))
	}
	return append(data, "[DONE]")
}

// chunk returns a chat completion chunk.
func chunk(text string) string {
	b, err := json.Marshal(text)
	if err != nil {
		panic(err) // a string always can be
	}
	return fmt.Sprintf(`{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"model",`+
		`"choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}`, b)
}

// sse returns an event stream.
func sse(data ...string) string {
	var b strings.Builder
	for _, d := range data {
		fmt.Fprintf(&b, "data: %s\n\n", d)
	}
	return b.String()
}

// complete is the model: small, and like a real one it fills pauses with comments.
func (g *gateway) complete(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body) // else the server doesn't see the connection end
	ctx, p := r.Context(), plan(r.PathValue("plan"))
	write := func(s string) {
		io.WriteString(w, s)
		http.NewResponseController(w).Flush()
	}
	if p == waiting {
		if !g.evict(r.PathValue("client"), p) {
			g.Errorf("%s: %s was not evicted", g.name, r.URL.Path)
		}
		<-ctx.Done()
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	all := answer()
	begin, next := sse(all[:len(first)]...), sse(all[len(first)])
	switch p {
	case untouched:
		write(sse(all...))
	case midAnswer:
		write(begin)
		for sleep(ctx, 10*time.Millisecond) {
			write(": still here\n\n")
		}
	case midEvent:
		write(begin + next[:len(next)/2])
		<-ctx.Done()
	case random:
		for text := sse(all...); text != "" && sleep(ctx, rand.N(4*time.Millisecond)); {
			n := strings.Index(text, "\n\n") + 2
			if rand.IntN(4) == 0 {
				n = min(len(text), 1+rand.IntN(2*len(next)))
			}
			write(text[:n])
			text = text[n:]
		}
	}
}

// sleep sleeps and reports whether ctx is not done.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
